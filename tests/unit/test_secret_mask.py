"""Secrets in the texts of a run: their places, and texts that resemble one and are none."""

from __future__ import annotations

import pytest

from gputrain_tui.history.export.masking import MASK, SecretMask, is_secret_variable

SECRETS = [
    ("curl -H 'Authorization: Bearer abc' ntfy.sh/x", ["abc"]),
    ('curl -H "authorization:token abc" ntfy.sh/x', ["abc"]),
    ("curl -H 'X-Api-Key: abc' -d done ntfy.sh/x", ["abc"]),
    ("curl -u me:abc https://host/x", ["abc"]),
    ("curl https://me:abc@host/x?api_key=def&run=1", ["abc", "def"]),
    ("git clone https://abc@host/x.git", ["abc"]),
    ("git clone https://abc:x-oauth-basic@host/x.git", ["abc"]),
    ("postgresql://me:ab@c:d@host:5432/runs", ["ab@c:d"]),
    ("export WANDB_API_KEY='abc def' MYSQL_PWD=abc; module load cuda", ["abc"]),
    ("train --hub-token abc --hf_token='abc' trainer.logger.api_key=abc", ["abc"]),
    ('{"api_key": "abc", "steps": 10}', ["abc"]),
    ("wget --header 'Cookie: abc' host", ["abc"]),
    ("echo hf_abcdefghijklmnopqrstuvw | huggingface-cli login", ["hf_abcdefghijklmnopqrstuvw"]),
]


@pytest.mark.parametrize(("text", "secrets"), SECRETS)
def test_a_secret_within_a_text_is_masked(text: str, secrets: list[str]) -> None:
    mask = SecretMask({})
    shown = mask.mask_text(text)
    assert MASK in shown
    assert [secret for secret in secrets if secret in shown] == []
    assert mask.masked
    assert mask.mask_text(shown) == shown


@pytest.mark.parametrize(
    "text",
    [
        "module load cuda; source /opt/keys/env.sh; export OMP_NUM_THREADS=4",
        "tcp://10.0.0.1:29500",
        "ssh://git@host/x.git",
        "https://host:8080/a@b",
        "me@host: /data/x",
        "--lr 0.1 --max-epochs 3 -u train.py",
        "rank 0: step 12, loss 0.5",
    ],
)
def test_a_text_without_a_secret_stays_as_it_is(text: str) -> None:
    mask = SecretMask({})
    assert (mask.mask_text(text), mask.masked) == (text, set())


@pytest.mark.parametrize("name", ["HF_TOKEN", "MYSQL_PWD", "SLACK_WEBHOOK_URL", "SENTRY_DSN", "GH_PAT", "BASIC_AUTH"])
def test_a_variable_is_a_secret_by_its_name(name: str) -> None:
    assert is_secret_variable(name)


@pytest.mark.parametrize("name", ["PWD", "OLDPWD", "PATH", "SSH_AUTH_SOCK", "COMPASS", "XAUTHORITY", "NCCL_DEBUG"])
def test_a_variable_that_is_a_place_or_a_setting_is_none(name: str) -> None:
    assert not is_secret_variable(name)


def test_words_of_a_command_line_are_masked_after_their_flags() -> None:
    mask = SecretMask({})
    plan = {
        "argv": ["--api-key", "abc", "-u", "me:abc", "-H", "Authorization: Bearer abc", "--lr", "0.1", "-u", "x.py"]
    }
    mask.mask_values(plan)
    shown = f"Authorization: Bearer {MASK}"
    assert plan["argv"] == ["--api-key", MASK, "-u", MASK, "-H", shown, "--lr", "0.1", "-u", "x.py"]


def test_passwords_in_addresses_of_the_environment_are_found_in_logs() -> None:
    mask = SecretMask({"HTTPS_PROXY": "http://me:correct-horse@proxy:3128", "PWD": "/home/somebody/project"})
    log = b"cannot reach proxy as me with correct-horse in /home/somebody/project\n"
    shown = mask.mask_bytes(log)
    assert len(shown) == len(log)
    assert shown == log.replace(b"correct-horse", b"*" * 13)


@pytest.mark.parametrize(
    ("comment", "shown"),
    [
        ('# api_key = "abc"', f"# api_key={MASK}"),
        ("# lr = 0.1, as in the paper", "# lr = 0.1, as in the paper"),
        ("# curl -H 'Authorization: Bearer abc'", f"# curl -H 'Authorization: Bearer {MASK}'"),
    ],
)
def test_a_setting_that_was_commented_out_is_masked(comment: str, shown: str) -> None:
    assert SecretMask({}).mask_comment(comment) == shown

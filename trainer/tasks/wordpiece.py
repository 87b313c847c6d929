"""WordPiece vocabulary of the masked language model, trained or loaded, and the cached tokenised text."""

from __future__ import annotations

import hashlib
import importlib.util
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from trainer.contract.errors import RequestError
from trainer.contract.task_files import require_file
from trainer.tasks import cache
from trainer.tasks.sources import Piece, Splits, read_pieces

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


class WordPieceVocabulary(NamedTuple):
    """Size of the vocabulary and ids of the special tokens that the model needs."""

    size: int
    cls: int
    sep: int
    mask: int


class TokenisedText(NamedTuple):
    """A tokenizer and what it made of a text."""

    tokenizer: str
    """The tokenizer as the JSON of the package ``tokenizers``."""
    vocabulary: WordPieceVocabulary
    texts: dict[str, Tensor]
    """Per split its tokens ``[N]``, int32, with [SEP] between two files."""


def tokenise(
    splits: Splits, *, vocab: str | None, vocab_size: int, lowercase: bool, restored: str | None = None
) -> TokenisedText:
    """Tokenise each split, or map it from the cache.

    Raises:
        RequestError: the package ``tokenizers`` is missing, the vocabulary file is not one, or it is another one than
            the checkpoint's.
    """
    if importlib.util.find_spec("tokenizers") is None:
        raise RequestError("task masked_lm needs the package tokenizers: pip install 'gputrain[tokenizers]'")
    vocab_path = require_file(vocab) if vocab is not None else None
    inputs = {
        **cache.fingerprint_splits(splits),
        "vocab": cache.fingerprint([vocab_path]) if vocab_path else vocab_size,
        "lowercase": lowercase,
    }
    if restored is not None:
        if vocab_path and load(vocab_path, lowercase).to_str() != restored:
            raise RequestError(
                f"{vocab_path} is not the vocabulary that the weights were trained with; leave vocab out to use theirs"
            )
        inputs["restored"] = hashlib.sha256(restored.encode()).hexdigest()

    def build(folder: Path) -> None:
        if restored is not None:
            tokenizer = from_json(restored, "the checkpoint's entry task_state")
        else:
            tokenizer = load(vocab_path, lowercase) if vocab_path else train(splits["train"], vocab_size, lowercase)
        tokenizer.save(str(folder / "tokenizer.json"))
        for split, pieces in splits.items():
            _tokenise(tokenizer, pieces, folder / f"{split}.bin")

    folder = cache.entry("wordpiece1", inputs, build)

    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    words = tokenizer.get_vocab()
    texts = {split: cache.mapped(folder / f"{split}.bin", torch.int32) for split in splits}
    vocabulary = WordPieceVocabulary(max(words.values()) + 1, words["[CLS]"], words["[SEP]"], words["[MASK]"])
    return TokenisedText(tokenizer.to_str(), vocabulary, texts)


def train(pieces: Sequence[Piece], size: int, lowercase: bool) -> Tokenizer:
    """Train a WordPiece vocabulary of about ``size`` words; the same text gives the same one on every machine.

    The package numbers the inner characters (``##a``) in the order of a hash map, which differs from run to run,
    and breaks ties between merges by those numbers. All characters are therefore numbered here, before it starts.
    """
    from tokenizers.trainers import WordPieceTrainer

    tokenizer = _untrained(None, lowercase)
    normalize = tokenizer.normalizer.normalize_str
    counts: Counter[str] = Counter()
    for line in _lines(pieces):
        counts.update(normalize(line))
    letters = sorted(char for char in counts if not char.isspace())
    max_alphabet = 1000  # maximum characters of a trained vocabulary; words with rarer ones become [UNK]
    kept = sorted(sorted(letters, key=lambda char: -counts[char])[:max_alphabet])
    rare = dict.fromkeys(map(ord, set(letters) - set(kept)), " ")
    trainer = WordPieceTrainer(
        vocab_size=size, special_tokens=[*SPECIAL_TOKENS, *kept, *("##" + char for char in kept)], show_progress=False
    )
    tokenizer.train_from_iterator((normalize(line).translate(rare) for line in _lines(pieces)), trainer)
    # Rebuilt from its words alone, so that only the five special tokens are special.
    return _untrained(tokenizer.get_vocab(), lowercase)


def load(path: Path, lowercase: bool) -> Tokenizer:
    """Read a ``tokenizer.json`` of the package, or BERT's ``vocab.txt`` with one word per line."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} is not a vocabulary: not UTF-8 text") from error
    if path.suffix == ".json":
        return from_json(text, str(path))
    words = {word.strip(): index for index, word in enumerate(text.splitlines())}
    return _with_special_tokens(_untrained(words, lowercase), str(path))


def from_json(text: str, source: str) -> Tokenizer:
    """Return the tokenizer that the package ``tokenizers`` wrote as JSON."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the package raises nothing more precise
        raise RequestError(f"{source} is not a tokenizer of the package tokenizers: {error}") from error
    return _with_special_tokens(tokenizer, source)


def _with_special_tokens(tokenizer: Tokenizer, source: str) -> Tokenizer:
    missing = [token for token in SPECIAL_TOKENS[1:] if tokenizer.token_to_id(token) is None]
    if missing:
        raise RequestError(f"{source} is not a vocabulary of BERT's kind: it lacks {', '.join(missing)}")
    return tokenizer


def _untrained(vocabulary: dict[str, int] | None, lowercase: bool) -> Tokenizer:
    from tokenizers import Tokenizer
    from tokenizers.models import WordPiece
    from tokenizers.normalizers import BertNormalizer
    from tokenizers.pre_tokenizers import BertPreTokenizer

    arguments: dict[str, Any] = {} if vocabulary is None else {"vocab": vocabulary}
    tokenizer = Tokenizer(WordPiece(unk_token="[UNK]", **arguments))
    tokenizer.normalizer = BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = BertPreTokenizer()
    return tokenizer


def _lines(pieces: Sequence[Piece]) -> Iterator[str]:
    """Yield the lines that are not blank; bytes that are not UTF-8 become replacement characters."""
    rest = b""
    for block in read_pieces(pieces):
        *whole, rest = (rest + block).split(b"\n")
        yield from (text for line in whole if (text := line.decode("utf-8", errors="replace").strip()))
    if text := rest.decode("utf-8", errors="replace").strip():
        yield text


def _tokenise(tokenizer: Tokenizer, pieces: Sequence[Piece], path: Path) -> None:
    lines_per_batch = 2048  # lines per call of the tokenizer, which splits them over its threads
    separator = array("i", [tokenizer.get_vocab()["[SEP]"]])
    with path.open("wb") as file:
        for index, piece in enumerate(pieces):
            if index:
                separator.tofile(file)
            lines = _lines([piece])
            while batch := list(islice(lines, lines_per_batch)):
                for encoding in tokenizer.encode_batch(batch, add_special_tokens=False):
                    array("i", encoding.ids).tofile(file)

"""WordPiece vocabulary of the masked language model, trained or loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer.contract.errors import RequestError
from trainer.tasks.sources import Piece, read_pieces
from trainer.tasks.tokenised_text import TokenizerKind, read_vocabulary_file, tokenizer_of, vocabulary_size

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


class WordPieceVocabulary(NamedTuple):
    """Size of the vocabulary and ids of the special tokens that the model needs."""

    size: int
    cls: int
    sep: int
    mask: int


def kind_of(*, vocab_size: int, lowercase: bool) -> TokenizerKind:
    """Return the WordPiece of these options."""
    return TokenizerKind(
        name="wordpiece2",
        settings=[vocab_size, lowercase],
        option="vocab",
        load=lambda path: load(path, lowercase),
        train=lambda pieces: train(pieces, vocab_size, lowercase),
        read=_lines,
        separator="[SEP]",
    )


def vocabulary_of(tokenizer: Tokenizer, *, source: str) -> WordPieceVocabulary:
    """Return size and special tokens of a tokenizer.

    Raises:
        RequestError: it lacks one of them.
    """
    words = _with_special_tokens(tokenizer, source).get_vocab()
    return WordPieceVocabulary(vocabulary_size(tokenizer), words["[CLS]"], words["[SEP]"], words["[MASK]"])


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
    text = read_vocabulary_file(path)
    if path.suffix == ".json":
        return _with_special_tokens(tokenizer_of(text, str(path)), str(path))
    words = {word.strip(): index for index, word in enumerate(text.splitlines())}
    return _with_special_tokens(_untrained(words, lowercase), str(path))


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

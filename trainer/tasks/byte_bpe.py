"""Byte-level BPE of the language model (Sennrich et al. 2016; bytes as in GPT-2), trained on the text or loaded."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from trainer.tasks.sources import Piece, read_pieces
from trainer.tasks.tokenised_text import TokenizerKind, tokenizer_in

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def kind_of(*, vocab_size: int | None) -> TokenizerKind:
    """Return the kind of a tokenizer of any model in a file, or of a BPE of so many tokens."""
    return TokenizerKind(
        name="bpe1",
        settings=[vocab_size],
        option="tokenizer",
        load=tokenizer_in,
        train=lambda pieces: train(pieces, vocab_size or 0),
        read=_blocks,
    )


def train(pieces: Sequence[Piece], size: int) -> Tokenizer:
    """Train a tokenizer of ``size`` tokens, fewer if the text has no more pairs; alike on every machine.

    The 256 bytes are tokens, so that every text is encoded and comes back unchanged.
    """
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel as Decoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.trainers import BpeTrainer

    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = Decoder()
    trainer = BpeTrainer(vocab_size=size, initial_alphabet=ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(_blocks(pieces), trainer)
    return tokenizer


def _blocks(pieces: Sequence[Piece]) -> Iterator[str]:
    """Yield the text in blocks of many lines; bytes that are not UTF-8 become replacement characters.

    A block ends with a line, so that no word is cut.
    """
    block_chars = 1 << 16  # so that a batch of blocks takes little memory
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    rest = ""
    for part in read_pieces(pieces):
        rest += decoder.decode(part)
        begin = 0
        while (end := rest.rfind("\n", begin, begin + block_chars) + 1) or len(rest) - begin > block_chars:
            end = end or begin + block_chars
            yield rest[begin:end]
            begin = end
        rest = rest[begin:]
    if rest := rest + decoder.decode(b"", final=True):
        yield rest

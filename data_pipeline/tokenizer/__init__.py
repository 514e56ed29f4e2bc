"""Text to token ids and back: SentencePiece models (bpe, unigram), characters, bytes, and tokenizers that the user supplies.

In our own tokenizers, ids 0 to 3 are pad, unk, bos and eos. In a supplied tokenizer, its files decide. `encode` adds neither bos
nor eos. Our own tokenizers decode every encoded text exactly, except `char`, which encodes characters outside the training text as
unk. A supplied tokenizer can lose text, which `round_trip_failures` counts.
"""

from data_pipeline.tokenizer.base import BOS_ID, EOS_ID, PAD_ID, UNK_ID, Encoded, NamedToken, Tokenizer, round_trip_failures
from data_pipeline.tokenizer.characters import ByteTokenizer, CharacterTokenizer
from data_pipeline.tokenizer.huggingface import HuggingFaceTokenizer
from data_pipeline.tokenizer.loading import load_tokenizer, open_supplied, save_tokenizer, supplied_files
from data_pipeline.tokenizer.sentence_pieces import SentencePieceTokenizer

__all__ = [
    "BOS_ID",
    "EOS_ID",
    "PAD_ID",
    "UNK_ID",
    "ByteTokenizer",
    "CharacterTokenizer",
    "Encoded",
    "HuggingFaceTokenizer",
    "NamedToken",
    "SentencePieceTokenizer",
    "Tokenizer",
    "load_tokenizer",
    "open_supplied",
    "round_trip_failures",
    "save_tokenizer",
    "supplied_files",
]

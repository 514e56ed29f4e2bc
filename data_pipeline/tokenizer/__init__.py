"""Text to token ids and back: SentencePiece models (bpe, unigram), characters, bytes, and tokenizers that the user supplies.

In tokenizers of our own, ids 0 to 3 are pad, unk, bos and eos; in a supplied one they are what its files say. `encode` adds neither
bos nor eos. Every kind of our own but `char` gives back exactly the text it was given, whatever it holds; `char` knows the
characters of the training text and writes unk for any other; of a supplied one, `round_trip_failures` tells.
"""

from data_pipeline.tokenizer.base import BOS_ID, EOS_ID, PAD_ID, UNK_ID, Encoded, Tokenizer, round_trip_failures
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
    "SentencePieceTokenizer",
    "Tokenizer",
    "load_tokenizer",
    "open_supplied",
    "round_trip_failures",
    "save_tokenizer",
    "supplied_files",
]

"""Text to token ids and back: SentencePiece models (bpe, unigram), characters, bytes, and tokenizers that the user supplies.

Our own have pad, unk, bos and eos as 0 to 3 and decode texts exactly, except `char` with unk. `encode` adds neither bos nor eos.
"""

from data_pipeline.tokenizer.base import ByteTokenizer, CharacterTokenizer, Encoded, NamedToken, Tokenizer, round_trip_failures
from data_pipeline.tokenizer.huggingface import HuggingFaceTokenizer
from data_pipeline.tokenizer.loading import load_tokenizer, open_supplied, save_tokenizer, supplied_files
from data_pipeline.tokenizer.sentence_pieces import SentencePieceTokenizer

from pathlib import Path

from data_pipeline.config import TokenizerConfig
from data_pipeline.publishing.fingerprint import _files_of_tokenizer
from data_pipeline.tokenizer import save_tokenizer
from data_pipeline.tokenizer.training import train_tokenizer


def test_the_tokenizer_of_a_run_counts_as_another_one_than_its_file_alone(tmp_path: Path) -> None:
    """The same SentencePiece file is of kind `bpe` in the one place, and of kind `sentencepiece` in the other."""
    sample = ["the cat sat on the mat and the dog ran to the sea"] * 50
    settings = TokenizerConfig(kind="bpe", vocab_size=290)
    save_tokenizer(train_tokenizer(sample, settings), tmp_path / "tokenizer")
    model = tmp_path / "tokenizer" / "bpe.model"
    assert _files_of_tokenizer(model) == _files_of_tokenizer(model.parent) == [(".model", model)]
    (tmp_path / "record.json").write_text("{}")
    assert _files_of_tokenizer(tmp_path) == [("bpe.model", model)]

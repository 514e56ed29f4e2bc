from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from common.errors import CheckpointError, ConfigError, PreparedDataError
from common.files import digest_bytes, digest_file
from data_pipeline.config import ChatConfig, TokenizerConfig
from data_pipeline.conversations.chat_template import saved_template, template_source
from data_pipeline.tokenizer import load_tokenizer, open_supplied
from tests.support.published import CONFIGS, SENTENCES, published_weights, write_published, write_tensors, write_tokenizer
from tests.support.records import record_of
from tests.support.runs import tiny_config
from tests.support.sentence_piece_models import model_with_dummy_prefix
from trainer.checkpoint.of_run import load_checkpoint, weights_digest
from trainer.commands.evaluate import EvaluateOptions, evaluate_run
from trainer.commands.generate import GenerateOptions, written_texts
from trainer.commands.import_model import ImportOptions, run
from trainer.commands.runs import listed_runs
from trainer.commands.saved_model import load_model
from trainer.interop.import_model import import_model
from trainer.loop import train
from trainer.model.attention import make_layout
from trainer.model.decoder import num_weights
from trainer.model.saved_decoder import open_decoder
from trainer.runs.saved_run import SavedRun
from trainer.verification.audit import audit_run
from trainer.verification.verify import verify_run


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", CONFIGS)
def test_an_imported_model_is_a_run_with_the_weights_and_the_tokenizer(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    directory = write_published(tmp_path / "published", kind, dtype=dtype, num_files=3)
    found = import_model(directory, tmp_path / "run")
    expected = {name: weight.float() for name, weight in published_weights(CONFIGS[kind], dtype).items()}
    config, checkpoint = SavedRun(tmp_path / "run").config, load_checkpoint(SavedRun(tmp_path / "run"), "latest")
    assert (checkpoint.step, found.vocab_size, config.model.vocab_rows) == (0, 283, 317)
    assert checkpoint.model.keys() == expected.keys()
    assert all(torch.equal(checkpoint.model[name], weight) for name, weight in expected.items())
    assert found.num_weights == num_weights(config.model, 283) == sum(weight.numel() for weight in expected.values())
    record = record_of(tmp_path / "run")
    assert record["weights"] == found.weights == weights_digest(expected)
    assert record["imported"]["model_type"] == kind
    assert record["imported"]["types"] == [{torch.float32: "F32", torch.bfloat16: "BF16"}[dtype]]
    names = ["config.json", *(f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3))]
    assert record["imported"]["files"] == {name: digest_file(directory / name) for name in names}
    tokenizer = load_tokenizer(tmp_path / "run" / "tokenizer")
    assert tokenizer.digest == open_supplied(directory, {}).digest == open_supplied(tmp_path / "run", {}).digest
    assert (tokenizer.bos_id, tokenizer.eos_id) == (None, tokenizer.token_id("<|endoftext|>"))
    assert "q_norm" in " ".join(expected) if kind == "qwen3" else "q_norm" not in " ".join(expected)


def test_the_number_of_files_changes_no_bit_and_padding_of_the_vocabulary_needs_no_setting(tmp_path: Path) -> None:
    digests = {
        import_model(write_published(tmp_path / f"{number}", num_files=number), tmp_path / f"run-{number}").weights
        for number in (1, 2, 7)
    }
    assert len(digests) == 1
    import_model(write_published(tmp_path / "padded", vocab_size=320), tmp_path / "run-padded")
    assert SavedRun(tmp_path / "run-padded").config.model.vocab_rows is None
    with pytest.raises(ConfigError, match=r"its tokenizer has 283 tokens, and vocab_size in config.json is 282"):
        import_model(write_published(tmp_path / "small", vocab_size=282), tmp_path / "none")


def test_the_commands_that_use_a_model_take_an_imported_one(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "imported"
    import_model(write_published(tmp_path / "published"), run)
    text = "".join(written_texts(GenerateOptions(run=run, prompt=("the birds",), temperature=0, max_tokens=5)))
    assert text.startswith("the birds")
    model, _ = load_model(SavedRun(run), SavedRun(run).config, "latest")
    ids = load_tokenizer(run / "tokenizer").encode("the birds")
    with torch.no_grad():
        for _ in range(5):
            layout = make_layout(torch.zeros(1, len(ids), dtype=torch.int32), torch.arange(len(ids))[None])
            ids.append(int(model(torch.tensor([ids]), layout)[0, -1, :283].argmax()))
    assert text.removesuffix("\n") == load_tokenizer(run / "tokenizer").decode(ids)
    assert [(one.name, one.state, one.step) for one in listed_runs(tmp_path / "runs")] == [("imported", "imported", 0)]
    with pytest.raises(PreparedDataError, match="name its folder with --data"):
        evaluate_run(EvaluateOptions(run=run))


def test_a_directory_with_a_sentencepiece_model_is_imported_with_it(tmp_path: Path) -> None:
    directory = write_published(tmp_path / "published", "llama", vocab_size=300)
    (directory / "tokenizer.json").unlink()
    (directory / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": {"content": "</s>"}}')
    (directory / "tokenizer.model").write_bytes(model_with_dummy_prefix(SENTENCES, 300))
    found = import_model(directory, tmp_path / "run")
    tokenizer = load_tokenizer(tmp_path / "run" / "tokenizer")
    assert (found.vocab_size, found.has_eos, tokenizer.kind) == (300, True, "sentencepiece")
    assert tokenizer.digest == open_supplied(directory, {}).digest
    assert (tokenizer.bos_id, tokenizer.eos_id) == (tokenizer.token_id("<s>"), tokenizer.token_id("</s>"))


def test_the_command_says_what_was_imported_and_what_to_do_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_published(tmp_path / "published")
    run(ImportOptions(directory=tmp_path / "published", output=tmp_path / "run"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"imported {tmp_path}/run: qwen3, 0.06M weights from F32, vocabulary 283"
    assert lines[1] == f"weights {record_of(tmp_path / 'run')['weights']}"
    assert f"prepare --tokenizer.path {tmp_path}/run --sources TEXT" in lines[3]
    assert f"train --init {tmp_path}/run --data DATA" in lines[4]


def test_an_imported_model_is_verified_and_has_no_steps(tmp_path: Path) -> None:
    run = tmp_path / "run"
    import_model(write_published(tmp_path / "published"), run)
    [outcome] = verify_run(run, train=train)
    assert outcome.text == "integrity    4 files and the weights of the imported model are unchanged"
    for refused in (
        lambda: list(verify_run(run, train=train, level="replay")),
        lambda: list(verify_run(run, train=train, num_steps=1)),
        lambda: audit_run(run),
        lambda: train(tiny_config(tmp_path, run)),
        lambda: train(tiny_config(tmp_path, tmp_path / "new", branch={"run": run})),
    ):
        with pytest.raises(
            ConfigError,
            match=r"its model is imported and was not trained here.* begin a new run with its weights: trainer train --init",
        ):
            refused()
    for name in ("config.toml", "tokenizer/tokenizer.json", "checkpoints/step-00000000/manifest.json"):
        before = (run / name).read_bytes()
        (run / name).write_bytes(before + b"\n")
        with pytest.raises(CheckpointError, match=name):
            list(verify_run(run, train=train))
        (run / name).write_bytes(before)
    [weights, *_] = (run / "checkpoints" / "objects").iterdir()
    weights.write_bytes(weights.read_bytes()[:-1] + b"\xff")
    with pytest.raises(CheckpointError, match=weights.name):
        list(verify_run(run, train=train))


def test_nothing_is_left_of_an_import_that_fails_and_nothing_is_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_published(tmp_path / "published")
    weights = published_weights(CONFIGS["qwen3"])
    weights["model.norm.weight"][0] = float("nan")
    write_tensors(directory / "model.safetensors", weights)
    with pytest.raises(CheckpointError, match="not finite"):
        import_model(directory, tmp_path / "runs" / "run")
    write_published(directory)
    with monkeypatch.context() as patch:
        patch.setattr("trainer.interop.import_model.environment_facts", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            import_model(directory, tmp_path / "runs" / "run")
    assert list((tmp_path / "runs").iterdir()) == []
    (tmp_path / "runs" / "run").mkdir()
    with pytest.raises(ConfigError, match="exists already; name a new folder"):
        import_model(directory, tmp_path / "runs" / "run")
    with pytest.raises(ConfigError, match="no such directory; name the Hugging Face directory"):
        import_model(tmp_path / "nothing", tmp_path / "other")
    (directory / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"holds no tokenizer\.json"):
        import_model(directory, tmp_path / "other")


def test_an_imported_model_does_not_depend_on_its_directory(tmp_path: Path) -> None:
    directory = write_published(tmp_path / "published", "llama")
    import_model(directory, tmp_path / "run")
    shutil.rmtree(directory)
    assert len(list(verify_run(tmp_path / "run", train=train))) == 1
    assert "".join(written_texts(GenerateOptions(run=tmp_path / "run", max_tokens=3)))


def test_a_run_that_holds_too_few_rows_for_its_tokenizer_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    import_model(write_published(tmp_path / "published"), run)
    settings = (run / "config.toml").read_text()
    (run / "config.toml").write_text(settings.replace("vocab_rows = 317", "vocab_rows = 200"))
    with pytest.raises(ConfigError, match=r"model.vocab_rows = 200, and the tokenizer has 283 tokens"):
        load_model(SavedRun(run), SavedRun(run).config, "latest")


TEMPLATE = "{% for m in messages %}{{ m.role + ': ' + m.content }}{{ eos_token if m.role == 'assistant' else '\n' }}{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"


@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json"])
def test_the_chat_template_of_the_directory_is_kept(place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = write_published(tmp_path / "published")
    if place == "tokenizer_config.json":
        write_tokenizer(directory, TEMPLATE)
    else:
        (directory / place).write_text(TEMPLATE)
    imported = tmp_path / "run"
    run(ImportOptions(directory=directory, output=imported))
    assert f"trainer generate {imported} --interactive" in capsys.readouterr().out
    tokenizer = load_tokenizer(imported / "tokenizer")
    template = saved_template(imported / "tokenizer", tokenizer)
    assert template is not None
    assert template.source == TEMPLATE
    assert record_of(imported)["files"]["tokenizer/chat_template.jinja"] == digest_bytes(TEMPLATE.encode())
    assert template_source(ChatConfig(template="tokenizer"), TokenizerConfig(path=imported)) == TEMPLATE
    assert open_decoder(SavedRun(imported), "latest").chat_template == template


def test_a_directory_without_a_chat_template_gives_a_run_without_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(ImportOptions(directory=write_published(tmp_path / "published"), output=tmp_path / "run"))
    assert not (tmp_path / "run" / "tokenizer" / "chat_template.jinja").exists()
    assert "chat" not in capsys.readouterr().out


def test_a_chat_template_that_no_conversation_can_use_is_left_out_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = write_published(tmp_path / "published")
    (directory / "chat_template.jinja").write_text("{{ raise_exception('no') }}")
    run(ImportOptions(directory=directory, output=tmp_path / "run"))
    assert (
        "chat template   left out: the chat template cannot be used: the template refuses the conversation: no"
        in capsys.readouterr().out
    )
    assert not (tmp_path / "run" / "tokenizer" / "chat_template.jinja").exists()


def test_a_chat_template_behind_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(TEMPLATE)
    directory = write_published(tmp_path / "published")
    (directory / "chat_template.jinja").symlink_to(tmp_path / "secret")
    with pytest.raises(ConfigError, match="its chat template cannot be read"):
        import_model(directory, tmp_path / "run")
    assert not (tmp_path / "run").exists()

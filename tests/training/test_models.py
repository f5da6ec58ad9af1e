"""Models of `graphaccel train`: from a type, a file or a folder, and what does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from graphaccel.errors import BadTraining
from graphaccel.training.models import check_positions, fit_vocabulary, make_model, read_config

SMALL = [("n_layer", "1"), ("n_embd", "8"), ("n_head", "2"), ("vocab_size", "16")]


def test_a_type_has_random_weights_and_a_folder_its_own(tmp_path: Path) -> None:
    config = read_config("gpt2", SMALL)
    model = make_model("causal-lm", "gpt2", config)
    model.save_pretrained(tmp_path / "saved")
    again = make_model(
        "causal-lm", str(tmp_path / "saved"), read_config(str(tmp_path / "saved"), [])
    )
    pairs = zip(model.state_dict().values(), again.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    config.to_json_file(tmp_path / "small.json")
    assert read_config(str(tmp_path / "small.json"), []).n_embd == 8


def test_the_sizes_of_the_data_are_given_to_a_new_model() -> None:
    config = read_config("gpt2", [])
    fit_vocabulary(config, "gpt2", 259, 128)
    assert (config.vocab_size, config.eos_token_id) == (259, 258)


def test_fields_are_numbers_words_and_truths() -> None:
    config = read_config("gpt2", [("n_layer", "3"), ("use_cache", "false"), ("n_inner", "null")])
    assert (config.n_layer, config.use_cache, config.n_inner) == (3, False, None)


@pytest.mark.parametrize(
    ("model", "changes", "text"),
    [
        (
            "gpt22",
            [],
            "error[GA418]: `gpt22` is no folder, no file and no model type of transformers\n"
            "  help: --model gpt2",
        ),
        (
            "gpt2",
            [("n_layer", "many")],
            "error[GA418]: `n_layer` of a `gpt2` can not be 'many'\n"
            "  why:  TypeError: Field 'n_layer' expected int, got str (value: 'many')\n"
            "  help: --set n_layer=12\n",
        ),
        (
            "gpt2",
            [("n_layers", "2")],
            "error[GA418]: a `gpt2` has no field `n_layers`\n  help: --set n_layer",
        ),
        (
            "gpt2",
            [("n_layer", "-1")],
            "error[GA418]: `n_layer` of `gpt2` is -1, no number of anything\n"
            "  help: --set n_layer=12\n",
        ),
    ],
)
def test_what_there_is_not(model: str, changes: list[tuple[str, str]], text: str) -> None:
    with pytest.raises(BadTraining) as caught:
        read_config(model, changes)
    assert str(caught.value).startswith(text)


def test_a_folder_without_a_configuration(tmp_path: Path) -> None:
    with pytest.raises(BadTraining, match="has no configuration"):
        read_config(str(tmp_path), [])


def test_a_task_that_the_type_does_not_have() -> None:
    with pytest.raises(BadTraining) as caught:
        make_model("masked-lm", "gpt2", transformers.GPT2Config())
    assert str(caught.value) == (
        "error[GA418]: transformers has no `gpt2` for masked-lm\n"
        "  help: --task causal-lm | sequence-classification\n"
        "  explain: graphaccel explain GA418"
    )


def test_a_vocabulary_larger_than_the_embedding(tmp_path: Path) -> None:
    config = transformers.GPT2Config(vocab_size=100)
    with pytest.raises(BadTraining) as caught:
        fit_vocabulary(config, str(tmp_path), 259, 8)
    assert "the tokenizer has 259 tokens, the model's embedding 100 rows" in str(caught.value)


def test_rows_longer_than_the_position_table(tmp_path: Path) -> None:
    config = transformers.GPT2Config(vocab_size=259, n_positions=16)
    with pytest.raises(BadTraining) as caught:
        fit_vocabulary(config, str(tmp_path), 259, 32)
    assert "rows of 32 tokens, but the model has 16 positions\n  help: --length 16" in str(
        caught.value
    )


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        (
            {"num_labels": 3},
            "the data has 3 classes, the model in `{}` 2\n  help: a new model:  --m",
        ),
        ({"hidden_size": 16}, "the weights in `{}` have other sizes than these settings"),
    ],
)
def test_weights_of_other_sizes(changed: dict[str, int], text: str, tmp_path: Path) -> None:
    config = transformers.BertConfig(**NARROW)
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path)
    other = transformers.BertConfig(**{**NARROW, **changed})
    with pytest.raises(BadTraining) as caught:
        make_model("sequence-classification", str(tmp_path), other)
    assert text.format(tmp_path) in str(caught.value)


NARROW: dict[str, Any] = {
    "num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "intermediate_size": 8,
    "vocab_size": 300,
}  # fmt: skip


@pytest.mark.parametrize("padding", [1, 20])
def test_positions_that_begin_behind_the_padding_token(padding: int) -> None:
    config = transformers.RobertaConfig(**NARROW, max_position_embeddings=32, pad_token_id=padding)
    model = make_model("masked-lm", "roberta", config)
    longest = 31 - padding
    check_positions(model, longest)
    model(torch.full((1, longest), 5))
    with pytest.raises(BadTraining) as caught:
        check_positions(model, longest + 1)
    assert "--set max_position_embeddings=33" in str(caught.value)
    with pytest.raises((IndexError, RuntimeError)):
        model(torch.full((1, longest + 1), 5))
    check_positions(transformers.BertModel(transformers.BertConfig(**NARROW)), 512)


def test_no_type_is_refused_as_it_is() -> None:
    for name in ("bert", "bloom", "deberta-v2", "llama", "mamba", "mixtral", "t5", "vit"):
        changes = [] if name == "vit" else [("pad_token_id", "-1")]
        assert read_config(name, changes).model_type == name


def test_a_model_whose_code_divides_by_a_size() -> None:
    with pytest.raises(BadTraining, match=r"the model can not be made\n  why:  .* by zero"):
        make_model("causal-lm", "gpt2", read_config("gpt2", [*SMALL, ("n_head", "0")]))


def test_a_model_that_torch_refuses_to_make() -> None:
    config = transformers.RobertaConfig(**NARROW, max_position_embeddings=32, pad_token_id=299)
    with pytest.raises(BadTraining, match="the model can not be made"):
        make_model("masked-lm", "roberta", config)


def test_a_fault_that_is_not_of_the_sizes_is_raised_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(config: object) -> None:
        raise ImportError("install timm")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_config", missing)
    with pytest.raises(ImportError, match="timm"):
        make_model("causal-lm", "gpt2", transformers.GPT2Config())

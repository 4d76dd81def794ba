"""Accepted models, the facts found out about a model, and refusals."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from store.files.architectures import TABLE, Known
from store.files.artefact import ArtefactRefused, inspect, settings
from store.files.safetensors import Broken, read_header
from tests.store.files.folders import KNOWN, LLAMA, sentence_transformers, write_model, write_safetensors

INDEX = "model.safetensors.index.json"


def test_an_accepted_folder_says_what_it_takes_to_serve_it(tmp_path: Path) -> None:
    artefact = inspect(write_model(tmp_path), KNOWN)
    assert (artefact.architecture, artefact.dtype, artefact.context_tokens) == ("LlamaForCausalLM", "float32", 2048)
    assert artefact.weight_bytes == 136
    assert artefact.kv_bytes_per_token == 2 * 4 * 2 * 32 * 2  # K and V × layers × KV heads × head × 2 B
    assert [file.name for file in artefact.files] == sorted(file.name for file in artefact.files)


def test_float32_files_weigh_half_unless_served_as_float32(tmp_path: Path) -> None:
    artefact = inspect(write_model(tmp_path), KNOWN)
    assert {d: artefact.weight_bytes_as(d) for d in ("auto", "float16", "float32")} == {
        "auto": 68,
        "float16": 68,
        "float32": 136,
    }


def test_a_language_model_alone_weighs_less_by_what_sees_and_hears(tmp_path: Path) -> None:
    write_model(tmp_path)
    seeing = {"model.visual.blocks.0.attn.qkv.weight": ("F32", [8], 32), "audio_tower.conv1.bias": ("F32", [2], 8)}
    language = {
        "model.language_model.norm.weight": ("F32", [16], 64),
        "lm_head.weight": ("F32", [1], 4),
    }
    write_safetensors(tmp_path / "model.safetensors", seeing | language)
    artefact = inspect(tmp_path, KNOWN)
    assert {file.name: file.tower_bytes for file in artefact.files if file.tower_bytes} == {"model.safetensors": 40}
    assert [artefact.weight_bytes_as("float32", alone) for alone in (False, True)] == [108, 68]
    assert artefact.weight_bytes_as("auto", True) == 34


def test_the_digest_is_of_the_content_and_not_of_the_place(tmp_path: Path) -> None:
    one, same, other = (
        inspect(write_model(tmp_path / name, seed=seed), KNOWN) for name, seed in (("a", ""), ("b", ""), ("c", "x"))
    )
    assert one.digest == same.digest != other.digest


def test_files_that_nothing_loads_do_not_change_the_digest(tmp_path: Path) -> None:
    before = inspect(write_model(tmp_path), KNOWN).digest
    (tmp_path / "README.md").write_text("hello")
    (tmp_path / "training_args.bin").write_bytes(b"pickle")  # beside safetensors, the file holds no weights
    assert inspect(tmp_path, KNOWN).digest == before


def test_every_byte_is_counted_as_progress(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    artefact = inspect(write_model(tmp_path), KNOWN, progress=lambda done, total: seen.append((done, total)))
    total = sum(file.size for file in artefact.files)
    assert seen[-1] == (total, total)


@pytest.mark.parametrize(
    ("config", "elements"),
    [
        ({"architectures": ["OPTForCausalLM"], "n_layer": 2, "n_head": 4, "n_embd": 64}, 2 * 2 * 64),
        (
            {
                "architectures": ["LlamaForCausalLM"],
                "num_hidden_layers": 3,
                "num_attention_heads": 16,
                "hidden_size": 128,
                "kv_lora_rank": 512,
                "qk_rope_head_dim": 64,
            },
            3 * (512 + 64),
        ),
        (
            {
                "architectures": ["Gemma3ForConditionalGeneration"],
                "text_config": {
                    "num_hidden_layers": 2,
                    "num_attention_heads": 4,
                    "num_key_value_heads": 1,
                    "head_dim": 256,
                    "hidden_size": 640,
                },
            },
            2 * 2 * 1 * 256,
        ),
        (  # a Qwen3-Next: three of four layers keep a state
            {
                "architectures": ["LlamaForCausalLM"],
                "num_hidden_layers": 8,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 64,
                "full_attention_interval": 4,
            },
            2 * 2 * 2 * 64,
        ),
        (  # a Nemotron-H, as transformers writes its config.json
            {
                "architectures": ["LlamaForCausalLM"],
                "layers_block_type": ["linear_attention", "mlp", "linear_attention", "full_attention"],
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 64,
            },
            2 * 1 * 2 * 64,
        ),
        (  # a Nemotron-H, as published
            {
                "architectures": ["LlamaForCausalLM"],
                "num_hidden_layers": 6,
                "hybrid_override_pattern": "M-M*-*",
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 64,
            },
            2 * 2 * 2 * 64,
        ),
    ],
)
def test_families_that_name_their_sizes_differently_are_understood(
    tmp_path: Path, config: dict[str, object], elements: int
) -> None:
    assert inspect(write_model(tmp_path, config), KNOWN).kv_bytes_per_token == 2 * elements


@pytest.mark.parametrize("path", [["thinker_config", "text_config"], ["language_config"], ["llm_config"]])
def test_the_sizes_of_a_language_model_stand_where_its_family_writes_them(tmp_path: Path, path: list[str]) -> None:
    config: dict[str, object] = LLAMA | {"max_position_embeddings": 512}
    for name in reversed(path):
        config = {name: config}
    found = inspect(write_model(tmp_path, {"architectures": ["Gemma3ForConditionalGeneration"]} | config), KNOWN)
    assert (found.kv_bytes_per_token, found.context_tokens) == (2 * 4 * 2 * 32 * 2, 512)
    inner = {path[-1]: LLAMA | {"layer_types": ["conv"]}}
    outer = {path[0]: inner} if len(path) > 1 else inner
    with pytest.raises(ArtefactRefused, match="a state for each request"):
        settings(write_model(tmp_path, {"architectures": ["Gemma3ForConditionalGeneration"]} | outer), KNOWN)


BESIDE = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "num_hidden_layers": 6}
LAYER = 2 * 2 * 64 * 2  # K and V × heads × head × 2 B
PATTERN = ["sliding_attention", "sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("config", "kept"),
    [
        ({"layer_types": PATTERN * 2, "sliding_window": 128}, {"window": (4, LAYER, 128), "full": (2, LAYER, 0)}),
        ({"layer_types": PATTERN * 2}, {"full": (6, LAYER, 0)}),  # no word on the length of the window
        ({"model_type": "gpt_oss", "sliding_window": 8}, {"window": (3, LAYER, 8), "full": (3, LAYER, 0)}),
        ({"model_type": "gemma3_text", "sliding_window": 8}, {"window": (5, LAYER, 8), "full": (1, LAYER, 0)}),
        ({"model_type": "cohere2", "sliding_window": 8}, {"window": (5, LAYER, 9), "full": (1, LAYER, 0)}),
        ({"model_type": "mistral", "sliding_window": 4096}, {"window": (6, LAYER, 4096)}),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False}, {"full": (6, LAYER, 0)}),
        ({"model_type": "qwen2", "sliding_window": 4096}, {"full": (6, LAYER, 0)}),
        (
            {"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 4},
            {"full": (4, LAYER, 0), "window": (2, LAYER, 8)},
        ),
        (
            {"model_type": "llama4_text", "attention_chunk_size": 8192, "no_rope_layers": [1, 1, 0, 1, 1, 0]},
            {"chunk": (4, LAYER, 8192), "full": (2, LAYER, 0)},
        ),
        (
            {"model_type": "gemma4_text", "sliding_window": 8, "global_head_dim": 128, "num_kv_shared_layers": 2},
            {"window": (4, LAYER, 8)},
        ),
        (
            {"layer_types": PATTERN * 2, "sliding_window": 8, "per_layer_config": {"2": {"head_dim": 128}, "5": {}}},
            {"window": (4, LAYER, 8), "full": (1, 2 * LAYER, 0), "full as well": (1, LAYER, 0)},
        ),
    ],
)
def test_layers_keep_what_the_config_says(
    tmp_path: Path, config: dict[str, object], kept: dict[str, tuple[int, int, int]]
) -> None:
    found = inspect(write_model(tmp_path, LLAMA | BESIDE | config), KNOWN).kv_layers
    expected = [(kind.partition(" ")[0], *sizes) for kind, sizes in kept.items()]
    assert [(each.kind, each.layers, each.bytes, each.reach) for each in found] == expected


def test_the_tokenizers_limit_bounds_the_context_as_in_vllm(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 512}')
    assert inspect(tmp_path, KNOWN).context_tokens == 512
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 1e30}')
    assert inspect(tmp_path, KNOWN).context_tokens == 2048


def test_a_context_that_the_table_of_positions_holds_is_accepted(tmp_path: Path) -> None:
    config = LLAMA | {"rope_parameters": _yarn(512, 4.0)}
    assert inspect(write_model(tmp_path, config), KNOWN).context_tokens == 2048


def test_a_snapshot_of_the_hubs_cache_is_accepted(tmp_path: Path) -> None:
    write_model(tmp_path / "blobs")
    snapshot = tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for file in (tmp_path / "blobs").iterdir():
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    assert inspect(snapshot, KNOWN).digest == inspect(tmp_path / "blobs", KNOWN).digest
    with pytest.raises(ArtefactRefused, match="leads out of the model's folder"):
        inspect(snapshot, KNOWN, roots=(tmp_path / "snapshots",))


def test_shards_named_by_an_index_count_and_others_do_not(tmp_path: Path) -> None:
    write_model(tmp_path)
    write_safetensors(tmp_path / "other.safetensors", {"z": ("F32", [1], 4)})
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": "model.safetensors"}}))
    artefact = inspect(tmp_path, KNOWN)
    assert artefact.weight_bytes == 136
    assert "other.safetensors" not in [file.name for file in artefact.files]


def _config(**changes: object) -> Callable[[Path], object]:
    return lambda folder: (folder / "config.json").write_text(json.dumps(LLAMA | changes))


def _write(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


def _replace_weights(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "model.safetensors").rename(folder / name)


def _cut(size: int) -> Callable[[Path], object]:
    return lambda folder: os.truncate(folder / "model.safetensors", size)


def _link(name: str, target: str) -> Callable[[Path], object]:
    def act(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return act


def _tensors(**tensors: tuple[str, list[int], int]) -> Callable[[Path], object]:
    return lambda folder: write_safetensors(folder / "model.safetensors", tensors)


def _header(header: bytes, data: int = 0) -> Callable[[Path], object]:
    text = len(header).to_bytes(8, "little") + header + bytes(data)
    return lambda folder: (folder / "model.safetensors").write_bytes(text)


def _overlap(folder: Path) -> None:
    tensors = {n: {"dtype": "U8", "shape": [4], "data_offsets": [b, b + 4]} for n, b in (("a", 0), ("b", 2))}
    _header(json.dumps(tensors).encode(), 6)(folder)


def _yarn(original: int, factor: float) -> dict[str, object]:
    return {"rope_type": "yarn", "original_max_position_embeddings": original, "factor": factor}


CORPUS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "has no config.json"),
    "config cut": (_write("config.json", '{"architectures": ["Llama'), "config.json can't be read"),
    "config nested": (_write("config.json", "[" * 100_000), "config.json can't be read"),
    "config no object": (_write("config.json", "[]"), "config.json can't be read"),
    "config not text": (lambda f: (f / "config.json").write_bytes(b"\xff\xfe"), "config.json can't be read"),
    "config huge": (_write("config.json", " " * (5 << 20)), "has 5242880 bytes, more than 4194304"),
    "config odd number": (_config(num_hidden_layers="four"), "config.json can't be read.*num_hidden_layers"),
    "no architecture": (_config(architectures=[]), "names no architectures"),
    "unknown architecture": (_config(architectures=["MambaLM"]), "'MambaLM' is not one"),
    "no sizes": (_config(num_hidden_layers=None), "how many layers"),
    "positions beyond the table": (
        _config(rope_parameters=_yarn(512, 2.0)),
        r"allows 2048 positions, and the table of its rotary embeddings \(YaRN\) ends after 1024",
    ),
    "positions beyond an old table": (_config(rope_scaling={"type": "yarn"} | _yarn(1024, 1)), "ends after 1024"),
    "positions beyond learned ones": (
        _tensors(**{"transformer.wpe.weight": ("F32", [1024, 2], 8192)}),
        "allows 2048 positions, and transformer.wpe.weight has 1024 rows",
    ),
    "positions beyond a layer's": (_config(rope_parameters={"full_attention": _yarn(256, 4)}), "ends after 1024"),
    "remote code": (
        _config(model_type="own", auto_map={"AutoModel": "modeling.X"}),
        "auto_map, which asks for remote code, and .* no code of its own for model_type 'own'",
    ),
    "remote code without a type": (_config(auto_map={"AutoModel": "modeling.X"}), "for model_type None"),
    "tokenizer code": (_write("tokenizer_config.json", '{"auto_map": {}}'), "tokenizer_config.json has auto_map"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "no tokenizer"),
    "half a tokenizer": (lambda f: (f / "tokenizer.json").rename(f / "vocab.json"), "no tokenizer"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), r"has no \*.safetensors"),
    "pickle": (_replace_weights("pytorch_model.bin"), "pytorch_model.bin is a pickle"),
    "checkpoint": (_replace_weights("consolidated.00.pth"), "consolidated.00.pth is a pickle"),
    "empty weights": (_cut(0), "model.safetensors has 0 bytes"),
    "header cut": (_cut(20), "model.safetensors has 20 bytes, its header claims"),
    "weights cut": (_cut(200), "has 200 bytes, its header promises"),
    "header huge": (_write("model.safetensors", "\x7f" * 64), "its header claims"),
    "header no JSON": (_header(b"{'a': 1}"), "not the format's JSON"),
    "header a list": (_header(b"[]"), "not the format's JSON"),
    "header tensor odd": (_header(b'{"a": {"dtype": "F32"}}'), "not the format's JSON"),
    "unknown dtype": (_tensors(a=("F99", [1], 4)), "unknown dtype 'F99'"),
    "shape lies": (_tensors(a=("F32", [3], 8)), r"of shape \[3\] F32 in 8 bytes"),
    "negative shape": (_tensors(a=("F32", [-1, -2], 8)), "of shape"),
    "overlap": (_overlap, "at byte 2 where 4 is expected"),
    "trailing bytes": (_cut(1 << 10), "has 1024 bytes, its header promises"),
    "no tensor": (_header(b"{}"), "hold no tensor"),
    "shard missing": (
        _write(INDEX, '{"weight_map": {"a": "m-2.safetensors"}}'),
        "names 'm-2.safetensors', which is not",
    ),
    "shard outside": (_write(INDEX, '{"weight_map": {"a": "../x.safetensors"}}'), "names '../x.safetensors', which is"),
    "tensor missing": (_write(INDEX, '{"weight_map": {"q": "model.safetensors"}}'), "puts 'q' into model.safetensors"),
    "index cut": (_write(INDEX, '{"weight_map": {'), "can't be read"),
    "link out": (_link("tokenizer.json", "/etc/passwd"), "tokenizer.json is a link that leads out"),
    "weights link out": (_link("model.safetensors", "/etc/passwd"), "model.safetensors is a link that leads out"),
    "device": (_link("tokenizer.json", "/dev/zero"), "tokenizer.json is a link that leads out"),
    "dangling": (_link("tokenizer.json", "nowhere"), "nowhere: No such file"),
    "folder as file": (lambda f: [(f / "tokenizer.json").unlink(), (f / "tokenizer.json").mkdir()], "not a plain file"),
    "pipe": (lambda f: [(f / "tokenizer.json").unlink(), os.mkfifo(f / "tokenizer.json")], "not a plain file"),
}


@pytest.mark.parametrize("case", CORPUS)
def test_what_can_not_be_served_is_refused_with_the_reason(tmp_path: Path, case: str) -> None:
    damage, reason = CORPUS[case]
    damage(write_model(tmp_path))
    with pytest.raises(ArtefactRefused, match=reason):
        inspect(tmp_path, KNOWN)


def test_program_code_beside_a_model_that_vllm_knows_is_ignored(tmp_path: Path) -> None:
    before = inspect(write_model(tmp_path, LLAMA | {"model_type": "llama"}), KNOWN)
    (tmp_path / "modeling_llama.py").write_text("raise SystemExit")
    assert inspect(tmp_path, KNOWN) == before
    _config(model_type="llama", auto_map={"AutoConfig": "modeling_llama.Config"})(tmp_path)
    found = inspect(tmp_path, KNOWN)
    assert (found.architecture, found.weight_bytes) == (before.architecture, before.weight_bytes)
    assert not [file for file in found.files if file.name.endswith(".py")]


NOT_SERVED: dict[str, tuple[dict[str, object], str]] = {
    "embeddings": ({"architectures": ["GteModel"]}, "GteModel is not served yet: no embeddings"),
    "labels of tokens": ({"architectures": ["BertForTokenClassification"]}, "for each token"),
    "draft": ({"architectures": ["EagleLlamaForCausalLM"]}, "deploy the larger model alone"),
    "speech": ({"architectures": ["WhisperForConditionalGeneration"]}, "not served yet: an encoder"),
    "state alone": ({"architectures": ["MambaForCausalLM"]}, "some layers keep a state"),
    "state beside attention": ({"architectures": ["JambaForCausalLM"]}, "a state for each request"),
    "latent": ({"architectures": ["LongcatFlashForCausalLM"]}, "a latent vector for each token"),
    "name inside vLLM": ({"architectures": ["TransformersForCausalLM"]}, "the model's original config.json"),
    "layers with a state": ({"layer_types": ["full_attention", "linear_attention"]}, "a state for each request"),
    "a config that is program code": ({"architectures": ["InternVLChatModel"]}, "with program code alone"),
    "layers of a text model": (
        {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": LLAMA | {"layer_types": ["conv"]}},
        "a state for each request",
    ),
    "sparse layers": ({"layer_types": ["indexed_attention"]}, "sparse attention keeps an index"),
    "encoder and decoder": ({"is_encoder_decoder": True}, "an encoder reads the input"),
}


@pytest.mark.parametrize("case", NOT_SERVED)
def test_a_model_that_is_not_served_yet_is_refused_before_a_weight_is_read(tmp_path: Path, case: str) -> None:
    config, reason = NOT_SERVED[case]
    (write_model(tmp_path, LLAMA | config) / "model.safetensors").unlink()
    with pytest.raises(ArtefactRefused, match=reason):
        settings(tmp_path, Known(frozenset(TABLE)))
    with pytest.raises(ArtefactRefused, match=reason):
        inspect(tmp_path, Known(frozenset(TABLE)))


BERT: dict[str, object] = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "hidden_size": 64,
    "max_position_embeddings": 512,
}


def test_an_encoder_keeps_no_token_and_makes_vectors(tmp_path: Path) -> None:
    found = inspect(write_model(tmp_path, BERT), Known(frozenset(TABLE)))
    assert (found.task, found.kv_bytes_per_token, found.kv_layers, found.context_tokens) == ("embed", 0, (), 512)
    scores = write_model(tmp_path / "scores", BERT | {"architectures": ["BertForSequenceClassification"]})
    assert inspect(scores, Known(frozenset(TABLE))).task == "classify"


def test_roberta_counts_its_positions_behind_the_padding(tmp_path: Path) -> None:
    config = {"architectures": ["RobertaModel"], "model_type": "roberta", "max_position_embeddings": 514}
    assert (
        inspect(write_model(tmp_path, BERT | config | {"pad_token_id": 1}), Known(frozenset(TABLE))).context_tokens
        == 512
    )


def test_files_of_sentence_transformers_make_a_decoder_an_embedder_and_belong_to_its_digest(tmp_path: Path) -> None:
    config = LLAMA | {"architectures": ["Qwen3ForCausalLM"]}
    text = inspect(write_model(tmp_path / "text", config), Known(frozenset(TABLE)))
    folder = sentence_transformers(write_model(tmp_path / "vectors", config))
    found = inspect(folder, Known(frozenset(TABLE)))
    assert (text.task, found.task) == ("generate", "embed") and found.kv_layers == text.kv_layers != ()
    assert found.context_tokens == 128 and text.digest != found.digest
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    assert inspect(folder, Known(frozenset(TABLE))).digest != found.digest


@pytest.mark.parametrize(
    "parts, reason",
    [({"Dense": "3_Dense"}, "a part 'Dense'"), ({"Pooling": "elsewhere"}, "call the folder 1_Pooling")],
)
def test_further_parts_of_sentence_transformers_are_refused(
    tmp_path: Path, parts: dict[str, object], reason: str
) -> None:
    folder = sentence_transformers(write_model(tmp_path, BERT), **parts)
    with pytest.raises(ArtefactRefused, match=reason):
        settings(folder, Known(frozenset(TABLE)))


def test_embeddings_of_an_architecture_that_was_never_compared_are_refused(tmp_path: Path) -> None:
    config = LLAMA | {"architectures": ["OPTForCausalLM"]}
    folder = sentence_transformers(write_model(tmp_path, config))
    with pytest.raises(ArtefactRefused, match="modules.json says that the model makes embeddings"):
        inspect(folder, Known(frozenset(TABLE)))


@pytest.mark.parametrize("kinds", [["attention", "attention"], ["mamba", "attention"]])
def test_a_hybrid_is_served_with_and_without_layers_that_keep_a_state(tmp_path: Path, kinds: list[str]) -> None:
    config = LLAMA | {"architectures": ["GraniteMoeHybridForCausalLM"], "layer_types": kinds}
    assert inspect(write_model(tmp_path, config), Known(frozenset(TABLE))).architecture == "GraniteMoeHybridForCausalLM"


def test_a_short_convolution_keeps_the_inputs_that_its_next_step_sees(tmp_path: Path) -> None:
    kinds = ["conv", "conv", "full_attention", "conv"]
    config = LLAMA | {"architectures": ["Lfm2ForCausalLM"], "layer_types": kinds, "conv_L_cache": 3}
    found = inspect(write_model(tmp_path, config), Known(frozenset(TABLE))).kv_layers
    assert [(each.kind, each.layers, each.bytes) for each in found] == [("state", 3, 2 * 256 * 2), ("full", 1, 256)]


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtefactRefused, match="is not a folder"):
        inspect(tmp_path / "none", KNOWN)


def test_a_file_written_by_the_formats_own_library_is_read(tmp_path: Path) -> None:
    import numpy

    save_file({"x": numpy.zeros((3, 5), "float16"), "y": numpy.zeros(0, "float32")}, tmp_path / "a.safetensors")
    header = read_header(tmp_path / "a.safetensors")
    assert header.bytes_by_dtype() == {"F16": 30, "F32": 0}


@given(st.binary(max_size=200), st.integers(0, 300))
def test_no_file_however_odd_is_more_than_broken(tmp_path_factory: pytest.TempPathFactory, text: bytes, n: int) -> None:
    path = tmp_path_factory.getbasetemp() / "odd.safetensors"
    path.write_bytes(n.to_bytes(8, "little") + text)
    try:
        read_header(path)
    except Broken:
        return
    assert len(text) >= n >= 2  # only a JSON object is a header

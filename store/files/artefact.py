"""Inspection of a model's folder before loading. An inspected folder is an artefact, named by the content's digest.

Safetensors only, no code, no file from outside the folder: a model is data written by strangers.
"""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from store.contract.kv_curve import KeptLayers, written_bytes
from store.contract.tasks import Task
from store.files import safetensors
from store.files.architectures import ENCODERS, Known, refusal, task_of
from store.files.model_config import Config, TextConfig

CONFIG_MOST = 4 << 20  # bytes of a config file
TOKENIZER_MOST = 128 << 20

INDEX = "model.safetensors.index.json"
CONFIGS = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
    "chat_template.json",
)
# Files of sentence-transformers. They decide on a model's vectors, and belong to the digests of models with vectors.
MODULES, POOLING = "modules.json", "1_Pooling/config.json"
SENTENCES = (
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_xlm-roberta_config.json",
)
VECTOR_CONFIGS = (MODULES, POOLING, "config_sentence_transformers.json", *SENTENCES)
TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "tekken.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "spiece.model",
    "chat_template.jinja",
)
# Sets of files that make a tokenizer.
TOKENIZER_SETS = (
    {"tokenizer.json"},
    {"tokenizer.model"},
    {"tekken.json"},
    {"vocab.json", "merges.txt"},
    {"vocab.txt"},
    {"spiece.model"},
)
# Names of the parts of models that see or hear, and of the parts that project into the language model.
TOWERS = frozenset(
    """
apm audio audio_adapter audio_projection_layer audio_tower av_model connector embed_audio embed_tokens_extend
embed_vision image_newline language_projection mlp1 mlp_AR mm_projector model_vision multi_modal_projector
patch_merger pre_mm_projector_norm qformer query_tokens resampler resampler_model sam_model visual visual_tokenizer
vision vision_backbone vision_embed_tokens vision_encoder vision_language_adapter vision_model vision_projection
vision_projector vision_tower vpm vte
""".split()
)
# Tables of learned positions of language models.
LEARNED = ("wpe.weight", "decoder.embed_positions.weight", "embeddings.position_embeddings.weight")
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")

_TORCH_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}

Progress = Callable[[int, int], None]  # bytes done, bytes in all
T = TypeVar("T")


class ArtefactRefused(Exception):
    """Error of a folder that cannot be served; the message names the fault, the number and the remedy."""


@dataclass(frozen=True)
class File:
    name: str
    size: int
    sha256: str
    tower_bytes: int = 0  # of weights in `TOWERS`


@dataclass(frozen=True)
class Artefact:
    digest: str
    architecture: str
    dtype: str  # type of most weights
    weight_bytes: int  # in the files
    kv_bytes_per_token: int  # written for a token by all layers, at two bytes an element
    context_tokens: int
    files: tuple[File, ...]
    kv_layers: tuple[KeptLayers, ...] = ()  # at two bytes an element; empty: every layer keeps every token

    @property
    def task(self) -> Task:
        return task_of(self.architecture, any(file.name == MODULES for file in self.files))

    def weight_bytes_as(self, dtype: str, language_model_only: bool = False) -> int:
        """Return the size of the weights in memory under a dtype, without towers if the language model is alone.

        `auto` keeps 16 bits and turns 32 bits into 16, as vLLM does. Quantised weights keep their size."""
        size = self.weight_bytes - (sum(file.tower_bytes for file in self.files) if language_model_only else 0)
        if self.dtype == "float32":
            return size if dtype == "float32" else size // 2
        if self.dtype in ("float16", "bfloat16"):
            return size * 2 if dtype == "float32" else size
        return size

    def kv_layers_as(self, dtype: str) -> tuple[KeptLayers, ...]:
        return tuple(kept.widened(2) for kept in self.kv_layers) if dtype == "float32" else self.kv_layers


def inspect(
    folder: Path, known: Known, roots: tuple[Path, ...] = (Path("/"),), progress: Progress | None = None
) -> Artefact:
    """Inspect a folder. Reads every byte of the model: call off the event loop. Raises Refused.

    Other files of the folder are ignored, program code too: no part of the platform runs code of a model.

    `known`: names known to vLLM. Links may lead only to files below `roots`."""
    try:
        return _Folder(folder, roots).artefact(known, progress or (lambda done, total: None))
    except OSError as error:
        raise ArtefactRefused(
            f"{error.filename or folder}: {error.strerror}: make it readable for the platform"
        ) from error


def settings(folder: Path, known: Known) -> list[str] | None:
    """Check a model before the weights are fetched. Return the weight files named by the index; None without an index.

    Raises Refused."""
    return _Folder(folder, (Path("/"),)).settings(known)


# ── config files ──────────────────────────────────────────────────────────────────────────────────────────────────────


class TokenizerConfig(msgspec.Struct, frozen=True):
    auto_map: Any = None
    model_max_length: float | None = None


class SentenceModule(msgspec.Struct, frozen=True):
    """A part of a model of sentence-transformers: the transformer, the pooling, a normalisation, a further layer."""

    type: str
    path: str = ""


class SentenceConfig(msgspec.Struct, frozen=True):
    max_seq_length: int | None = None


class WeightIndex(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


# ── the folder ────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Folder:
    """Relevant files of a model, each checked to be a plain file from an allowed place."""

    def __init__(self, folder: Path, roots: tuple[Path, ...]) -> None:
        if not folder.is_dir():
            raise ArtefactRefused(f"{folder} is not a folder: give the one that holds config.json")
        self._folder = folder.resolve()
        # The hub's cache links each snapshot's files to ../../blobs.
        hub = self._folder.parent.name == "snapshots"
        self._roots, self._bounds = roots, self._folder.parents[1] if hub else self._folder
        self._names = sorted(path.name for path in self._folder.iterdir())
        self._names += [POOLING] if (self._folder / POOLING).is_file() else []

    def artefact(self, known: Known, progress: Progress) -> Artefact:
        config = self._config(known)
        headers = self._weights()
        self._check_tokenizer()
        sizes = config.inner() or config
        kept = [] if config.architectures[0] in ENCODERS else sizes.kept_layers() or config.kept_layers()
        if not kept and config.architectures[0] not in ENCODERS:
            raise ArtefactRefused(
                "config.json does not say how many layers and heads the model has: give its original file"
            )
        read = (*CONFIGS, *TOKENIZERS, INDEX, *(VECTOR_CONFIGS if self._task(config).pools else ()))
        files = self._hash([*(name for name in read if name in self._names), *headers], progress)
        files = [replace(file, tower_bytes=_tower_bytes(headers.get(file.name))) for file in files]
        by_dtype: dict[str, int] = {}
        for header in headers.values():
            for dtype, size in header.bytes_by_dtype().items():
                by_dtype[dtype] = by_dtype.get(dtype, 0) + size
        most = max(sorted(by_dtype), key=by_dtype.__getitem__, default="")
        if not most:
            raise ArtefactRefused("the safetensors files hold no tensor: copy the model's weights again")
        return Artefact(
            digest=_digest(files),
            architecture=config.architectures[0],
            dtype=_TORCH_DTYPES.get(most, most.lower()),
            weight_bytes=sum(by_dtype.values()),
            kv_bytes_per_token=written_bytes(kept),
            context_tokens=self._context_tokens(sizes, {} if config.inner() else headers, self._task(config).pools),
            files=tuple(files),
            kv_layers=tuple(kept),
        )

    def settings(self, known: Known) -> list[str] | None:
        self._config(known)
        self._check_tokenizer()
        return self._shards() if INDEX in self._names else None

    def _config(self, known: Known) -> Config:
        if "config.json" not in self._names:
            raise ArtefactRefused(f"{self._folder} has no config.json: give the folder that holds the model's files")
        config = self._json("config.json", Config)
        if not config.architectures:
            raise ArtefactRefused("config.json names no architectures: give the model's original file")
        if config.architectures[0] not in known.architectures:
            raise ArtefactRefused(
                f"architecture {config.architectures[0]!r} is not one that this version's vLLM serves"
            )
        if why := refusal(config.architectures[0], config.inner() or config, MODULES in self._names):
            raise ArtefactRefused(why)
        if self._task(config).pools and MODULES in self._names:
            self._check_modules()
        own = known.model_types is None or config.model_type in known.model_types
        if config.auto_map is not None and not own:
            raise ArtefactRefused(
                f"config.json has auto_map, which asks for remote code, and this version's vLLM has no code of its own "
                f"for model_type {config.model_type!r}: use a model that vLLM knows by itself"
            )
        return config

    def _task(self, config: Config) -> Task:
        return task_of(config.architectures[0], MODULES in self._names)

    def _check_modules(self) -> None:
        """Refuse a model of sentence-transformers with parts beside transformer, pooling and normalisation."""
        for module in self._json(MODULES, list[SentenceModule]):
            kind = module.type.rsplit(".", 1)[-1]
            if kind not in ("Transformer", "Pooling", "Normalize"):
                raise ArtefactRefused(
                    f"{MODULES} names a part {kind!r}, and only Transformer, Pooling and Normalize are served: choose "
                    "a model without the part"
                )
            folder = POOLING.partition("/")[0]
            if kind == "Pooling" and module.path != folder:
                raise ArtefactRefused(
                    f"{MODULES} says that the pooling is in {module.path!r}: call the folder {folder}"
                )
            if kind == "Pooling" and POOLING not in self._names:
                raise ArtefactRefused(f"{MODULES} names a pooling, and there is no {POOLING}: add the model's own")

    def _check_tokenizer(self) -> None:
        if not any(needed <= set(self._names) for needed in TOKENIZER_SETS):
            raise ArtefactRefused("there is no tokenizer (tokenizer.json or tokenizer.model): add the model's own")
        for name in TOKENIZERS:
            if name in self._names:
                self._size(name, TOKENIZER_MOST)
        if "tokenizer_config.json" in self._names and self._tokenizer_config().auto_map is not None:
            raise ArtefactRefused(
                "tokenizer_config.json has auto_map, which asks for remote code: use a known tokenizer"
            )

    def _tokenizer_config(self) -> TokenizerConfig:
        return self._json("tokenizer_config.json", TokenizerConfig)

    def _context_tokens(self, sizes: TextConfig, headers: dict[str, safetensors.Header], pools: bool) -> int:
        """Return the context, in tokens: as in vLLM, the smaller limit of config and tokenizer, and if the model
        `pools`, of sentence-transformers.

        An unset limit of a tokenizer is absurdly large. Raises Refused if a table of positions, computed or among the
        weights in `headers`, has fewer rows than the config's limit."""
        tokens = sizes.context_tokens()
        if (rows := sizes.position_rows()) is not None and tokens > rows:
            raise ArtefactRefused(
                f"config.json allows {tokens} positions, and the table of its rotary embeddings (YaRN) ends after "
                f"{rows}: set max_position_embeddings to {rows}, or give the model's own rope factor"
            )
        for name, rows in _learned_positions(headers):
            if rows < tokens:
                raise ArtefactRefused(
                    f"config.json allows {tokens} positions, and {name} has {rows} rows: set max_position_embeddings "
                    f"to {rows}, or give the model's own weights"
                )
        for name in (name for name in SENTENCES if name in self._names and pools):
            tokens = min(tokens, self._json(name, SentenceConfig).max_seq_length or tokens)
        if "tokenizer_config.json" in self._names and (limit := self._tokenizer_config().model_max_length):
            return max(1, int(min(tokens, limit)))
        return tokens

    # ── weights ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _weights(self) -> dict[str, safetensors.Header]:
        """Return the header of each weight file by name: files named by the index; without an index, every file."""
        found = [name for name in self._names if name.endswith(".safetensors")]
        if not found and (pickles := [name for name in self._names if name.endswith(PICKLES)]):
            raise ArtefactRefused(f"{pickles[0]} is a pickle, which can run code: convert the weights to safetensors")
        if not found:
            raise ArtefactRefused(f"{self._folder} has no *.safetensors: add the model's weights")
        if INDEX not in self._names:
            return {name: self._header(name) for name in found}
        index = self._json(INDEX, WeightIndex, most=TOKENIZER_MOST).weight_map
        shards = self._shards()
        if missing := [shard for shard in shards if shard not in found]:
            raise ArtefactRefused(
                f"{INDEX} names {missing[0]!r}, which is not in the folder ({len(missing)} of {len(shards)})"
            )
        headers = {shard: self._header(shard) for shard in shards}
        if lost := [tensor for tensor, shard in index.items() if tensor not in headers[shard].tensors]:
            raise ArtefactRefused(
                f"{INDEX} puts {lost[0]!r} into {index[lost[0]]}, which does not have it: copy both again"
            )
        return headers

    def _shards(self) -> list[str]:
        return sorted(set(self._json(INDEX, WeightIndex, most=TOKENIZER_MOST).weight_map.values()))

    def _header(self, name: str) -> safetensors.Header:
        self._size(name)
        try:
            return safetensors.read_header(self._folder / name)
        except safetensors.Broken as error:
            raise ArtefactRefused(f"{name} {error}: it is damaged or cut short, copy it again") from error

    # ── files ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _size(self, name: str, most: int | None = None) -> int:
        """Return the size of a plain file in an allowed place. Raises Refused if the file breaks a rule."""
        path = (self._folder / name).resolve()
        if not path.is_relative_to(self._bounds) or not any(path.is_relative_to(root) for root in self._roots):
            raise ArtefactRefused(f"{name} is a link that leads out of the model's folder: put the file itself there")
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ArtefactRefused(f"{name} is not a plain file: put the file itself there")
        if most is not None and status.st_size > most:
            raise ArtefactRefused(f"{name} has {status.st_size} bytes, more than {most}: it is not what its name says")
        return status.st_size

    def _json(self, name: str, kind: type[T], most: int = CONFIG_MOST) -> T:
        self._size(name, most)
        try:
            return msgspec.json.decode((self._folder / name).read_bytes(), type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ArtefactRefused(f"{name} can't be read: {error}: copy it again") from error

    def _hash(self, names: list[str], progress: Progress) -> list[File]:
        sizes = {name: self._size(name) for name in sorted(names)}
        done, total = 0, sum(sizes.values())
        files = []
        for name, size in sizes.items():
            with (self._folder / name).open("rb") as file:
                sha256 = hashlib.sha256()
                while chunk := file.read(1 << 20):
                    sha256.update(chunk)
                    done += len(chunk)
                    progress(done, total)
            files.append(File(name, size, sha256.hexdigest()))
        return files


def _learned_positions(headers: dict[str, safetensors.Header]) -> list[tuple[str, int]]:
    """Return tensors with a row for each position, and their rows; [] if the model computes positions."""
    tensors = [named for header in headers.values() for named in header.tensors.items()]
    return [(name, tensor.shape[0]) for name, tensor in tensors if name.endswith(LEARNED) and tensor.shape]


def _tower_bytes(header: safetensors.Header | None) -> int:
    """Return the bytes of towers in a weight file; 0 for other files.

    The first parts of a tensor's name say where in the model the tensor is: `model.visual.blocks.0.attn.qkv.weight`."""
    tensors = header.tensors.items() if header else ()
    return sum(tensor.size for name, tensor in tensors if not TOWERS.isdisjoint(name.split(".")[:3]))


def _digest(files: list[File]) -> str:
    lines = "".join(f"{file.name}\0{file.size}\0{file.sha256}\n" for file in files)
    return hashlib.sha256(lines.encode()).hexdigest()

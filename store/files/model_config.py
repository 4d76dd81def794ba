"""What serving needs of a model's config.json: sizes of layers, kinds of KV cache, length of the context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from store.contract.kv_curve import KeptLayers, LayerKind
from store.files.architectures import ModelForm

CONTEXT_DEFAULT = 2048  # tokens, if the config does not say: vLLM's default
ELEMENT_BYTES = 2

# Kinds of layers in config.json; further kinds keep every token.
STATES = ("linear_attention", "mamba", "hybrid", "M")
NOTHING = ("mlp", "moe", "conv", "-", "E")
WINDOWS = {"sliding_attention": LayerKind.WINDOW, "chunked_attention": LayerKind.CHUNK}
# Kind of most layers, and which layer keeps every token, as transformers fills in a config without kinds of layers.
PATTERNS = {
    "gemma2": ("sliding_attention", 2),
    "gemma3": ("sliding_attention", 6),
    "gemma3_text": ("sliding_attention", 6),
    "gemma3n_text": ("sliding_attention", 5),
    "gemma4_text": ("sliding_attention", 6),
    "cohere2": ("sliding_attention", 4),
    "exaone4": ("sliding_attention", 4),
    "olmo3": ("sliding_attention", 4),
    "gpt_oss": ("sliding_attention", 2),
    "llama4_text": ("chunked_attention", 4),
    "qwen3_next": ("linear_attention", 4),
}
OPTIONAL_WINDOWS = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3")  # without use_sliding_window: no window
ROBERTA = ("roberta", "xlm-roberta")
YARN = ("yarn", "deepseek_yarn", "deepseek_llama_scaling")  # kinds of rope for which vLLM makes a table


class StateConfig(ModelForm, frozen=True):
    """Sizes of layers that keep a state: Mamba 2, or linear attention by the gated delta rule."""

    linear_num_key_heads: Any = None
    linear_num_value_heads: Any = None
    linear_key_head_dim: Any = None
    linear_value_head_dim: Any = None
    linear_conv_kernel_dim: Any = None
    num_heads: Any = None  # heads of Mamba 2 alone, as `head_dim`, `state_size` and `expand`
    mamba_n_heads: Any = None
    mamba_num_heads: Any = None
    n_mamba_heads: Any = None
    mamba_d_head: Any = None
    mamba_head_dim: Any = None
    mamba_headdim: Any = None
    mamba_n_groups: Any = None
    mamba_ngroups: Any = None
    n_groups: Any = None
    mamba_d_state: Any = None
    ssm_state_size: Any = None
    state_size: Any = None
    mamba_expand: Any = None
    expand: Any = None
    mamba_d_conv: Any = None
    conv_kernel: Any = None
    mamba_ssm_cache_dtype: Any = None
    conv_L_cache: Any = None  # LFM2: inputs that a short convolution sees
    conv_dim: Any = None


class TextConfig(StateConfig, frozen=True):
    """Sizes of the language model, under the names used by the families of models."""

    model_type: str | None = None
    layer_types: list[str] | None = None
    num_hidden_layers: int | None = None
    n_layer: int | None = None
    num_layers: int | None = None
    num_attention_heads: int | None = None
    n_head: int | None = None
    num_key_value_heads: int | None = None
    num_global_key_value_heads: int | None = None
    hidden_size: int | None = None
    n_embd: int | None = None
    head_dim: int | None = None
    attention_head_dim: int | None = None
    global_head_dim: int | None = None  # Gemma 4: heads of layers that keep every token
    attention_k_eq_v: bool | None = None
    per_layer_config: Any = None  # number of a layer → values that differ
    layers_block_type: list[str] | None = None
    hybrid_override_pattern: str | None = None
    full_attention_interval: int | None = None
    num_kv_shared_layers: int | None = None
    sliding_window: int | None = None
    sliding_window_pattern: Any = None
    use_sliding_window: bool | None = None
    max_window_layers: int | None = None
    attention_chunk_size: int | None = None
    no_rope_layers: Any = None
    kv_lora_rank: int | None = None
    qk_rope_head_dim: int | None = None
    max_position_embeddings: int | None = None
    n_positions: int | None = None
    max_sequence_length: int | None = None
    max_seq_len: int | None = None
    seq_length: int | None = None
    model_max_length: int | None = None
    pad_token_id: Any = None
    rope_parameters: Any = None
    rope_scaling: Any = None

    def position_rows(self) -> int | None:
        """Return how many positions the smallest table of rotary embeddings holds; None if the config bounds no table.

        vLLM makes a YaRN table of original_max_position_embeddings * factor rows, whatever max_position_embeddings
        says, and reads past the table's end without a word."""
        rows = [_yarn_rows(rope) for given in (self.rope_parameters, self.rope_scaling) for rope in _ropes(given)]
        return min((number for number in rows if number), default=None)

    def context_tokens(self) -> int:
        """Return the most tokens of a request. RoBERTa counts positions from the padding token's number plus one."""
        named = (
            self.max_position_embeddings,
            self.n_positions,
            self.max_sequence_length,
            self.max_seq_len,
            self.seq_length,
            self.model_max_length,
        )
        first = 1 + _whole(self.pad_token_id) if self.model_type in ROBERTA else 0
        return min((number for number in named if number), default=CONTEXT_DEFAULT) - first

    # ── KV cache ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def kept_layers(self) -> list[KeptLayers]:
        """Return the layers by what the layers keep, at two bytes an element; [] if the config does not say.

        A window that the config leaves to a default counts as no window, so long requests are counted too high."""
        kinds = self._kinds()
        shared = self.num_kv_shared_layers or 0  # the last layers read what earlier layers keep
        counts: dict[tuple[LayerKind, int], int] = {}
        for number, kind in enumerate(kinds[: len(kinds) - shared]):
            for keeps in self._keeps(kind):
                same = keeps, 0 if keeps is LayerKind.STATE else self._elements(keeps, number)
                counts[same] = counts.get(same, 0) + 1
        found = [
            self._states(layers)
            if keeps is LayerKind.STATE
            else KeptLayers(keeps, layers, ELEMENT_BYTES * elements, self._reach(keeps))
            for (keeps, elements), layers in counts.items()
        ]
        return [kept for kept in found if kept.bytes]

    def _kinds(self) -> list[str]:
        """Return a kind for each layer, in the words of config.json."""
        if given := self.layer_types or self.layers_block_type or [*(self.hybrid_override_pattern or "")]:
            return [*given]
        layers = self.num_hidden_layers or self.n_layer or self.num_layers or 0
        if self.model_type == "mamba2":
            return ["mamba"] * layers
        most, every = PATTERNS.get(self.model_type or "", ("full_attention", 1))
        if self.full_attention_interval:
            most, every = "linear_attention", self.full_attention_interval
        elif isinstance(self.sliding_window_pattern, int) and self.sliding_window_pattern > 0:
            most, every = "sliding_attention", self.sliding_window_pattern
        elif most == "chunked_attention" and isinstance(self.no_rope_layers, list) and self.no_rope_layers:
            return [most if rope else "full_attention" for rope in self.no_rope_layers]
        elif every == 1 and self.sliding_window:
            return self._kinds_with_window(layers)
        return [most if (layer + 1) % every else "full_attention" for layer in range(layers)]

    def _kinds_with_window(self, layers: int) -> list[str]:
        """Return the kinds of layers of a model with a window, and without a word on which layers have the window."""
        if self.model_type not in OPTIONAL_WINDOWS and self.use_sliding_window is not False:
            return ["sliding_attention"] * layers
        first = (self.max_window_layers or 0) if self.use_sliding_window else layers
        return ["full_attention" if layer < first else "sliding_attention" for layer in range(layers)]

    def _keeps(self, kind: str) -> Sequence[LayerKind]:
        if kind in NOTHING and not self._short_convolution(kind):
            return ()
        if kind in STATES or self._short_convolution(kind) or self.model_type == "falcon_h1":
            beside = kind == "hybrid" or self.model_type == "falcon_h1"  # attention and a state, side by side
            return (LayerKind.FULL, LayerKind.STATE) if beside else (LayerKind.STATE,)
        keeps = WINDOWS.get(kind, LayerKind.FULL)
        return (keeps if self._reach(keeps) else LayerKind.FULL,)

    def _short_convolution(self, kind: str) -> bool:
        return kind == "conv" and _whole(self.conv_L_cache) > 0

    def _reach(self, keeps: LayerKind) -> int:
        """Return the tokens of a window or chunk; 0 without."""
        if keeps is LayerKind.CHUNK:
            return self.attention_chunk_size or 0
        if keeps is LayerKind.WINDOW and self.sliding_window:
            return self.sliding_window + (self.model_type == "cohere2")  # vLLM gives windows of Cohere 2 one token more
        return 0

    def _elements(self, keeps: LayerKind, number: int) -> int:
        """Return the elements that a layer of attention keeps of a token: K and V × heads × elements of a head.

        Latent attention keeps a single vector. Returns 0 if the config does not say."""
        if self.kv_lora_rank:
            return self.kv_lora_rank + (self.qk_rope_head_dim or 0)
        heads, width = self.num_attention_heads or self.n_head, self.hidden_size or self.n_embd
        head_dim = self.head_dim or self.attention_head_dim or (width // heads if width and heads else None)
        kept_heads = self.num_key_value_heads or heads
        if self.model_type == "gemma4_text" and keeps is LayerKind.FULL and not self.per_layer_config:
            head_dim = self.global_head_dim or 512
            kept_heads = self.num_global_key_value_heads if self.attention_k_eq_v else kept_heads
        own = self.per_layer_config.get(str(number)) if isinstance(self.per_layer_config, dict) else None
        if isinstance(own, dict):
            head_dim, kept_heads = own.get("head_dim", head_dim), own.get("num_key_value_heads", kept_heads)
        return 2 * _whole(kept_heads) * _whole(head_dim)

    def _states(self, layers: int) -> KeptLayers:
        """Return layers with a state: inputs of a convolution, and a matrix for each head.

        The layers have 0 bytes if the config does not say the sizes."""
        fixed = 0
        if inputs := _whole(self.conv_L_cache):
            width = _whole(self.conv_dim, self.hidden_size)
            return KeptLayers(LayerKind.STATE, layers, ELEMENT_BYTES * width * (inputs - 1))
        if heads := _whole(self.linear_num_value_heads):
            key_heads, key_dim = _whole(self.linear_num_key_heads), _whole(self.linear_key_head_dim)
            value_dim, kernel = _whole(self.linear_value_head_dim), _whole(self.linear_conv_kernel_dim) or 4
            convolved, matrices = 2 * key_heads * key_dim + heads * value_dim, heads * value_dim * key_dim
        else:
            heads = _whole(self.mamba_n_heads, self.mamba_num_heads, self.n_mamba_heads, self.num_heads)
            inner = (_whole(self.mamba_expand, self.expand) or 2) * (self.hidden_size or 0)
            own_dim = self.head_dim if self.model_type == "mamba2" else None
            head_dim = _whole(self.mamba_d_head, self.mamba_head_dim, self.mamba_headdim, own_dim)
            head_dim = head_dim or (inner // heads if heads else 0)
            groups = _whole(self.mamba_n_groups, self.mamba_ngroups, self.n_groups) or 1
            state = _whole(self.mamba_d_state, self.ssm_state_size, self.state_size)
            kernel = _whole(self.mamba_d_conv, self.conv_kernel) or 4
            convolved, matrices = heads * head_dim + 2 * groups * state, heads * head_dim * state
            if self.model_type == "nemotron_h" and self.mamba_ssm_cache_dtype in (None, "float32"):
                fixed = 4 * matrices
        size = ELEMENT_BYTES * convolved * (kernel - 1) + (fixed or ELEMENT_BYTES * matrices) if matrices else 0
        return KeptLayers(LayerKind.STATE, layers, size, fixed_bytes=fixed)


class ThinkerConfig(msgspec.Struct, frozen=True):
    """The part of a Qwen-Omni that answers in text; the other parts speak."""

    text_config: TextConfig | None = None


class Config(TextConfig, frozen=True):
    architectures: list[str] = []
    auto_map: Any = None
    text_config: TextConfig | None = None
    language_config: TextConfig | None = None
    llm_config: TextConfig | None = None
    thinker_config: ThinkerConfig | None = None

    def inner(self) -> TextConfig | None:
        """Return the language model's own config; None if the sizes stand in the config itself."""
        thinker = self.thinker_config.text_config if self.thinker_config else None
        return self.text_config or thinker or self.language_config or self.llm_config


def _whole(*values: Any) -> int:
    """Return the first whole number of a config's values; 0 without."""
    return next((value for value in values if isinstance(value, int) and value > 0), 0)


def _ropes(given: Any) -> list[dict[str, Any]]:
    """Return the ropes of a config: a single rope, or a rope for each kind of layer."""
    if not isinstance(given, dict):
        return []
    return [given, *(rope for rope in given.values() if isinstance(rope, dict))]


def _yarn_rows(rope: dict[str, Any]) -> int | None:
    original, factor = rope.get("original_max_position_embeddings"), rope.get("factor")
    if rope.get("rope_type", rope.get("type")) not in YARN:
        return None
    return int(original * factor) if isinstance(original, int) and isinstance(factor, int | float) else None

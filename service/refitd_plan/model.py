"""The model's shape, and what is counted from it: parameters, and bytes of KV cache. Pure; `config.py` reads it.

Known kinds: decoders with grouped-query attention (Llama, Qwen2, Qwen3, Mistral), mixtures of experts (Qwen2-MoE,
Qwen3-MoE, Mixtral) and multi-head latent attention (DeepSeek V2 and V3). Field names are those of transformers.
"""

from dataclasses import dataclass

_BIASED = frozenset({"qwen2", "qwen2_moe"})  # biases on q, k and v that their configurations do not speak of
_NORMED = frozenset({"qwen3", "qwen3_moe"})  # a norm on each head of q and k
KNOWN = _BIASED | _NORMED | {"llama", "mistral", "mixtral", "deepseek_v2", "deepseek_v3"}
"""The kinds whose parameters and caches are counted as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1). `q_rank`: None for plain q."""

    kv_rank: int
    q_rank: int | None
    rope_dim: int
    nope_dim: int
    v_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts in all layers but the first `dense_layers`. Sizes are of the inner dimension."""

    count: int
    active: int
    size: int
    shared_size: int
    dense_layers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A decoder. `inner` is the MLP's size; `tied`: the embedding is the output head too."""

    kind: str
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context: int | None
    tied: bool
    latent: Latent | None = None
    experts: Experts | None = None

    @property
    def q_size(self) -> int:
        """The width of all heads' queries."""
        if self.latent is not None:
            return self.heads * (self.latent.nope_dim + self.latent.rope_dim)
        return self.heads * self.head_dim

    @property
    def out_size(self) -> int:
        """The width of what attention gives to its output projection."""
        return self.heads * (self.latent.v_dim if self.latent is not None else self.head_dim)

    @property
    def norms_heads(self) -> bool:
        """Whether each head's query and key is normalised."""
        return self.kind in _NORMED

    @property
    def kv_size(self) -> int:
        """The width of all heads' keys, and of their values."""
        return self.kv_heads * self.head_dim

    @property
    def attention_parameters(self) -> int:
        """Of one layer, with its two norms."""
        norms = 2 * self.hidden
        if self.latent is not None:
            return norms + self._latent_parameters(self.latent)
        matrices = 2 * self.hidden * self.q_size + 2 * self.hidden * self.kv_size
        biases = self.q_size + 2 * self.kv_size if self.kind in _BIASED else 0
        return norms + matrices + biases + (2 * self.head_dim if self.norms_heads else 0)

    def _latent_parameters(self, latent: Latent) -> int:
        down = self.hidden * (latent.kv_rank + latent.rope_dim) + latent.kv_rank
        up = latent.kv_rank * self.heads * (latent.nope_dim + latent.v_dim)
        compressed = latent.q_rank
        q = (
            self.hidden * self.q_size
            if compressed is None
            else self.hidden * compressed + compressed + compressed * self.q_size
        )
        return down + up + q + self.out_size * self.hidden

    @property
    def dense_layers(self) -> int:
        """Layers with a plain MLP."""
        return self.layers if self.experts is None else self.experts.dense_layers

    @property
    def dense_parameters(self) -> int:
        """All that is in every layer, and plain MLPs, routers and shared experts; without experts and embeddings."""
        total = self.layers * self.attention_parameters + self.dense_layers * 3 * self.hidden * self.inner + self.hidden
        if self.experts is not None:
            router = self.hidden * self.experts.count
            gate = self.hidden if self.kind == "qwen2_moe" else 0
            shared = 3 * self.hidden * self.experts.shared_size
            total += (self.layers - self.dense_layers) * (router + shared + gate)
        return total

    @property
    def expert_parameters(self) -> int:
        """All experts of all layers."""
        if self.experts is None:
            return 0
        return (self.layers - self.dense_layers) * self.experts.count * 3 * self.hidden * self.experts.size

    @property
    def embedding_parameters(self) -> int:
        """The embedding, and the output head where it is another matrix."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        """All of them."""
        return self.dense_parameters + self.expert_parameters + self.embedding_parameters

    def kv_bytes(self, tp: int, pp: int, element: int) -> float:
        """What one token takes in the KV cache of one GPU, in bytes.

        Keys and values of every layer, heads over `tp` (a head is never cut: more ranks than heads hold copies); with
        latent attention one compressed vector, whole on each rank. As SGLang's `DefaultPoolConfigurator` counts.
        """
        layers = self.layers / pp
        if self.latent is not None:
            return (self.latent.kv_rank + self.latent.rope_dim) * layers * element
        return 2 * max(1, self.kv_heads // tp) * self.head_dim * layers * element


def lora_parameters(model: Model, rank: int) -> float:
    """Two matrices of this rank beside each projection of every layer's attention and MLP."""
    attention = 2 * (model.hidden + model.q_size) + 2 * (model.hidden + model.kv_size)
    return rank * model.layers * (attention + 3 * (model.hidden + model.inner))

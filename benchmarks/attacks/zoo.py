"""Honest networks for the loader's allow-list: tiny random `transformers` models and classic PyTorch networks.

Every entry is exported by the project's own export and loaded again; `accepted` is the share that loads and answers as
the model does.
"""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.storage import export, load

Inputs = dict[str, Tensor]
SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "projection_dim", "embedding_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("intermediate_size", "d_ff", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner"), 64),
    **dict.fromkeys(("moe_intermediate_size", "hidden_dim", "shared_expert_intermediate_size"), 64),
    **dict.fromkeys(("vocab_size",), 99),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok",), 2),
    **dict.fromkeys(("head_dim", "d_kv"), 8),
    **dict.fromkeys(("image_size",), 32),
    **dict.fromkeys(("patch_size",), 8),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 0),
}
"""What a configuration is shrunk to, where it has such a field."""


@dataclass(frozen=True)
class Entry:
    """An honest network: how it is made, its example inputs, and how it is asked."""

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    predict: Callable[..., Any]


def accepted(entries: Sequence[Entry], say: Callable[[str], None] = lambda text: None) -> float:
    """Return the share of networks that export, load and answer as the model does."""
    failures = {entry.name: reason for entry in entries if (reason := refusal(entry))}
    for name, reason in failures.items():
        say(f"{name}: {reason}")
    return 1 - len(failures) / len(entries)


def refusal(entry: Entry) -> str:
    """Return why an honest network is refused; empty where it is accepted."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as root, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model, inputs = entry.make().eval(), entry.inputs()
            made = load(export(model, entry.predict, inputs, Path(root) / "model"))
            with torch.no_grad():
                wanted = entry.predict(model, *(tensor.clone() for tensor in inputs.values()))
            made_answer = made(inputs)
            first = made_answer if isinstance(made_answer, Tensor) else next(iter(made_answer.values()))
            want = wanted if isinstance(wanted, Tensor) else next(iter(wanted.values()))
            return "" if torch.allclose(first, want, rtol=1e-3, atol=1e-4, equal_nan=True) else "another answer"
        except Exception as error:
            return f"{type(error).__name__}: {str(error)[:400]}"


def zoo() -> list[Entry]:
    """Return all entries: `transformers` architectures, then classics."""
    from .zoo_classics import classics

    return [*transformers_entries(), *classics()]


def sample() -> list[Entry]:
    """Return twelve entries of different kinds, few enough for the test suite."""
    from .zoo_classics import classics

    chosen = ("llama", "bert", "t5", "vit", "mamba", "mixtral")
    classic = ("resnet_classic", "lstm", "unet", "fft", "reductions", "grid_sample")
    return [entry for entry in [*transformers_entries(chosen), *classics()] if entry.name in (*chosen, *classic)]


def _names(text: str) -> list[str]:
    return text.split()


DECODERS = _names(
    """
    llama mistral qwen2 qwen3 gemma gemma2 gemma3_text phi phi3 gpt2 gpt_neo gpt_neox gptj opt bloom falcon olmo olmo2
    stablelm starcoder2 cohere cohere2 granite codegen persimmon mpt xglm biogpt glm helium smollm3 ctrl gpt_bigcode
    exaone4 seed_oss arcee apertus openai-gpt ernie4_5 lfm2 bitnet diffllama
    """
)
EXPERTS = _names(
    """
    mixtral qwen2_moe qwen3_moe olmoe granitemoe phimoe gpt_oss deepseek_v3 ernie4_5_moe glm4_moe
    """
)
STATE_SPACE = _names(
    """
    mamba mamba2 falcon_mamba jamba
    """
)
ENCODERS = _names(
    """
    bert roberta distilbert albert electra deberta deberta-v2 mpnet camembert xlm-roberta convbert squeezebert fnet
    nystromformer big_bird ibert layoutlm megatron-bert mobilebert modernbert nomic_bert rembert roformer splinter
    xlm xlnet ernie data2vec-text esm yoso mra canine tapas markuplm eurobert
    """
)
ENCODER_DECODERS = _names(
    """
    t5 bart mbart pegasus marian m2m_100 blenderbot blenderbot-small bigbird_pegasus plbart mvp
    """
)
VISION = _names(
    """
    resnet segformer vit deit beit swin swinv2 dinov2 dinov3_vit mobilenet_v1 mobilenet_v2 poolformer vit_msn
    siglip_vision_model clip_vision_model ijepa data2vec-vision dpt yolos textnet vitdet vivit videomae
    """
)
AUDIO = _names(
    """
    whisper wav2vec2 hubert wavlm sew unispeech data2vec-audio audio-spectrogram-transformer
    """
)
MULTIMODAL = _names(
    """
    clip clipseg owlvit
    """
)


def ids(rows: int = 2, length: int = 8) -> Tensor:
    return torch.arange(rows * length).reshape(rows, length) % 97 + 1


def transformers_entries(names: Sequence[str] | None = None) -> list[Entry]:
    """Return entries of `transformers` architectures with tiny random weights."""
    families: list[tuple[Sequence[str], Callable[[str], Entry]]] = [
        ((*DECODERS, *EXPERTS, *STATE_SPACE, *ENCODERS), _text),
        (ENCODER_DECODERS, _translation),
        (VISION, _vision),
        (AUDIO, _audio),
        (MULTIMODAL, _multimodal),
    ]
    return [entry(name) for group, entry in families for name in group if names is None or name in names]


def tiny(name: str) -> Any:
    """Return the architecture's own configuration with small sizes."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(name)
    _shrink(config)
    for inner in ("text_config", "vision_config", "encoder", "decoder", "audio_config"):
        if hasattr(config, inner) and getattr(config, inner) is not None and hasattr(getattr(config, inner), "to_dict"):
            _shrink(getattr(config, inner))
    for key, value in SPECIAL.get(name, {}).items():
        setattr(config, key, value)
    return config


def _shrink(config: Any) -> None:
    for key, value in SMALL.items():
        old = getattr(config, key, None)
        if (isinstance(old, int) and not isinstance(old, bool)) or (old is None and key == "pad_token_id"):
            with contextlib.suppress(Exception):
                setattr(config, key, value)
    kinds = getattr(config, "layer_types", None)
    if isinstance(kinds, list):
        with contextlib.suppress(Exception):
            config.layer_types = kinds[: getattr(config, "num_hidden_layers", 2)]
    config._attn_implementation = "sdpa"
    if hasattr(config, "use_cache"):
        config.use_cache = False


SPECIAL: dict[str, dict[str, Any]] = {
    "gptj": {"rotary_dim": 4},
    "codegen": {"rotary_dim": 4},
    "deepseek_v3": {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "q_lora_rank": 16,
                    "kv_lora_rank": 16, "num_key_value_heads": 4, "n_group": 2, "topk_group": 1},
    "esm": {"vocab_size": 99, "pad_token_id": 1, "mask_token_id": 2},
    "swin": {"num_heads": [2, 2], "depths": [1, 1], "embed_dim": 16, "window_size": 2, "patch_size": 4},
    "swinv2": {"num_heads": [2, 2], "depths": [1, 1], "embed_dim": 16, "window_size": 2, "patch_size": 4},
    "mamba": {"intermediate_size": 64, "state_size": 4, "time_step_rank": 4},
    "falcon_mamba": {"intermediate_size": 64, "state_size": 4, "time_step_rank": 4},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": 4},
}  # fmt: skip
"""Fields that an architecture needs beside the common ones."""


def built(name: str) -> nn.Module:
    from transformers import AutoModel

    config = tiny(name)
    try:
        return AutoModel.from_config(config)
    except ValueError:
        config._attn_implementation = "eager"
        return AutoModel.from_config(config)


def first_tensor(answer: Any) -> Tensor:
    """Return the main output of a `transformers` model."""
    for name in ("last_hidden_state", "logits", "pooler_output", "logits_per_image", "image_embeds"):
        value = getattr(answer, name, None)
        if isinstance(value, Tensor):
            return value
    return next(value for value in answer.to_tuple() if isinstance(value, Tensor))


def _text(name: str) -> Entry:
    return Entry(name, lambda: built(name), lambda: {"ids": ids()}, lambda model, x: first_tensor(model(input_ids=x)))


def _translation(name: str) -> Entry:
    def predict(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return first_tensor(model(input_ids=x, decoder_input_ids=y, use_cache=False))

    return Entry(name, lambda: built(name), lambda: {"ids": ids(), "target": ids(length=5)}, predict)


def _vision(name: str) -> Entry:
    def inputs() -> Inputs:
        config = tiny(name)
        size = getattr(config, "image_size", 32)
        size = size if isinstance(size, int) else 32
        size = max(size, 32)
        frames = getattr(config, "num_frames", None)
        shape = (2, frames, 3, size, size) if isinstance(frames, int) else (2, 3, size, size)
        return {"pixels": torch.randn(shape)}

    return Entry(name, lambda: built(name), inputs, lambda model, x: first_tensor(model(pixel_values=x)))


def _audio(name: str) -> Entry:
    def inputs() -> Inputs:
        config = tiny(name)
        if name == "whisper":
            return {"features": torch.randn(2, config.num_mel_bins, config.max_source_positions * 2), "ids": ids()}
        if name == "speech_to_text":
            return {"features": torch.randn(2, 40, config.input_feat_per_channel), "ids": ids()}
        if name == "audio-spectrogram-transformer":
            return {"values": torch.randn(2, config.max_length, config.num_mel_bins)}
        if name == "wav2vec2-bert":
            return {"features": torch.randn(2, 40, config.feature_projection_input_dim)}
        if name == "clap_audio_model":
            return {"features": torch.randn(2, 1, 1001, 64)}
        if name == "moonshine":
            return {"values": torch.randn(2, 4000), "ids": ids()}
        if name in ("encodec", "mimi", "dac"):
            return {"values": torch.randn(2, 1, 3200)}
        return {"values": torch.randn(2, 4000)}

    def predict(model: nn.Module, x: Tensor, y: Tensor | None = None) -> Tensor:
        key = (
            "input_features"
            if name in ("whisper", "speech_to_text", "wav2vec2-bert", "clap_audio_model")
            else "input_values"
        )
        more = {} if y is None else {"decoder_input_ids": y, "use_cache": False}
        return first_tensor(model(**{key: x}, **more))

    return Entry(name, lambda: built(name), inputs, predict)


def _multimodal(name: str) -> Entry:
    def predict(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return first_tensor(model(input_ids=x, pixel_values=y))

    def inputs() -> Inputs:
        vision = getattr(tiny(name), "vision_config", tiny(name))
        size = getattr(vision, "image_size", 32)
        return {"ids": ids(length=7), "pixels": torch.randn(2, 3, size, size)}

    return Entry(name, lambda: built(name), inputs, predict)

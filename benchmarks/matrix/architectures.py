"""Architectures of `transformers` from tiny random configurations; nothing is downloaded."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Generator, Tensor, nn

from .network import Network, Registry, randint, randn

VOCABULARY, LENGTH, CLASSES, IMAGE = 31, 6, 3, 16
SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocabulary_size"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size", "emb_dim"), 16),
    **dict.fromkeys(("word_embed_proj_dim", "encoder_hidden_size", "projection_dim", "classifier_proj_size"), 16),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "hidden_dim", "ffn_hidden_size"), 24),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 24),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers", "num_encoder_layers", "depth"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_source_positions"), 32),
    "max_target_positions": 32,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_top_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 8),
    "image_size": IMAGE,
    "patch_size": 8,
    **dict.fromkeys(("pad_token_id", "decoder_start_token_id"), 0),
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sliding_window": 4,
    "type_vocab_size": 2,
    "use_cache": False,
    "apply_spec_augment": False,
}
"""Sizes by the names that configurations use."""


def tiny(model_type: str, **given: Any) -> Any:
    """Return a small configuration of an architecture without dropout and noise; `given` overrules common sizes."""
    from transformers import CONFIG_MAPPING

    return _tiny_of(CONFIG_MAPPING[model_type], given)


def _tiny_of(kind: Any, given: dict[str, Any]) -> Any:
    values: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        if field.name in SIZES and SIZES[field.name] is not None:
            values[field.name] = SIZES[field.name]
        elif ("drop" in field.name or "jitter" in field.name) and isinstance(field.default, float):
            values[field.name] = 0.0
    for name, part in getattr(kind, "sub_configs", {}).items():
        if hasattr(part, "sub_configs") and dataclasses.is_dataclass(part) and part.__name__ != "AutoConfig":
            values[name] = _tiny_of(part, given.get(name, {})).to_dict()
    nested = set(getattr(kind, "sub_configs", {}))
    values.update({name: value for name, value in given.items() if name not in nested or not isinstance(value, dict)})
    return kind(**values)


def _tokens(rows: int, g: Generator) -> Tensor:
    return 3 + randint(g, VOCABULARY - 3, rows, LENGTH)


def _text(rows: int, g: Generator) -> dict[str, Tensor]:
    tokens = _tokens(rows, g)
    return {"input_ids": tokens, "labels": tokens}


def _masked(rows: int, g: Generator) -> dict[str, Tensor]:
    return {"input_ids": _tokens(rows, g), "labels": _tokens(rows, g)}


def _classes(rows: int, g: Generator) -> dict[str, Tensor]:
    return {"input_ids": _tokens(rows, g), "labels": randint(g, CLASSES, rows)}


def _images(rows: int, g: Generator, size: int = IMAGE) -> dict[str, Tensor]:
    return {"pixel_values": randn(g, rows, 3, size, size), "labels": randint(g, CLASSES, rows)}


def _waves(rows: int, g: Generator) -> dict[str, Tensor]:
    return {"input_values": randn(g, rows, 400), "labels": randint(g, CLASSES, rows)}


def _spectrum(rows: int, g: Generator) -> dict[str, Tensor]:
    return {"input_values": randn(g, rows, 24, 16), "labels": randint(g, CLASSES, rows)}


def own_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss that the architecture computes by itself."""
    loss: Tensor = model(**batch).loss
    return loss


ARCHITECTURES = Registry("transformers")


def add(
    name: str, head: str, data: Callable[[int, Generator], Any], loss: Any = own_loss, type: str = "", **given: Any
) -> None:
    """Register an architecture: the class of its head, what it is fed with, and sizes that are its own."""

    def model() -> nn.Module:
        import transformers

        config = tiny(type or name, **given)
        # The grouped matrix product of CPUs knows no double precision.
        config._experts_implementation = "eager"
        made: nn.Module = getattr(transformers, head)(config)
        return made

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

    source = repr((name, head, data.__name__, given)) + _common_source()

    def make() -> Network:
        # Norms, rotary embeddings, softmax and losses of the library compute in single precision.
        return Network(model=model, data=data, loss=loss, optimizer=optimizer, rows=11, rounding=1e-3)

    ARCHITECTURES.add_as(name, make, source)


@cache
def _common_source() -> str:
    parts = (_tiny_of, _text, _masked, _classes, _images, _waves, _spectrum)
    return repr(SIZES) + "".join(inspect.getsource(part) for part in parts)


# Decoders.
add("gpt2", "GPT2LMHeadModel", _text)
add("gpt_neo", "GPTNeoForCausalLM", _text, attention_types=[[["global", "local"], 1]], window_size=4)
add("gpt_neox", "GPTNeoXForCausalLM", _text)
add("gptj", "GPTJForCausalLM", _text, rotary_dim=4)
add("codegen", "CodeGenForCausalLM", _text, rotary_dim=4)
add("gpt_bigcode", "GPTBigCodeForCausalLM", _text)
add("opt", "OPTForCausalLM", _text)
add("bloom", "BloomForCausalLM", _text)
add("falcon", "FalconForCausalLM", _text)
add("mpt", "MptForCausalLM", _text)
add("llama", "LlamaForCausalLM", _text)
add("mistral", "MistralForCausalLM", _text)
add("qwen2", "Qwen2ForCausalLM", _text)
add("qwen3", "Qwen3ForCausalLM", _text)
add("gemma", "GemmaForCausalLM", _text)
add("gemma2", "Gemma2ForCausalLM", _text)
add("gemma3_text", "Gemma3ForCausalLM", _text)
add("phi", "PhiForCausalLM", _text)
add("phi3", "Phi3ForCausalLM", _text)
add("stablelm", "StableLmForCausalLM", _text)
add("starcoder2", "Starcoder2ForCausalLM", _text)
add("cohere", "CohereForCausalLM", _text)
add("cohere2", "Cohere2ForCausalLM", _text)
add("olmo", "OlmoForCausalLM", _text)
add("olmo2", "Olmo2ForCausalLM", _text)
add("olmo3", "Olmo3ForCausalLM", _text)
add("granite", "GraniteForCausalLM", _text)
add("glm", "GlmForCausalLM", _text)
add("glm4", "Glm4ForCausalLM", _text)
add("smollm3", "SmolLM3ForCausalLM", _text)
add("nemotron", "NemotronForCausalLM", _text)
add("helium", "HeliumForCausalLM", _text)
add("diffllama", "DiffLlamaForCausalLM", _text)
add("biogpt", "BioGptForCausalLM", _text)
add("persimmon", "PersimmonForCausalLM", _text)
add("openai-gpt", "OpenAIGPTLMHeadModel", _text)
add("ctrl", "CTRLLMHeadModel", _text, dff=24)
add("xlnet", "XLNetLMHeadModel", _text, d_inner=24)
# Mixtures of experts.
add("mixtral", "MixtralForCausalLM", _text)
add("mixtral_auxiliary", "MixtralForCausalLM", _text, type="mixtral", output_router_logits=True)
add("qwen2_moe", "Qwen2MoeForCausalLM", _text)
add("qwen3_moe", "Qwen3MoeForCausalLM", _text)
add("olmoe", "OlmoeForCausalLM", _text)
add("olmoe_auxiliary", "OlmoeForCausalLM", _text, type="olmoe", output_router_logits=True)
add("gpt_oss", "GptOssForCausalLM", _text)
add("granitemoe", "GraniteMoeForCausalLM", _text)
add(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    _text,
    n_group=1,
    topk_group=1,
    q_lora_rank=8,
    kv_lora_rank=8,
    qk_rope_head_dim=4,
    qk_nope_head_dim=4,
    v_head_dim=4,
    first_k_dense_replace=1,
    num_key_value_heads=4,
)
add("phimoe", "PhimoeForCausalLM", _text)
add("jetmoe", "JetMoeForCausalLM", _text, kv_channels=4, num_key_value_heads=2)
# State spaces and recurrences.
add("mamba", "MambaForCausalLM", _text, state_size=4, time_step_rank=4)
add("mamba2", "Mamba2ForCausalLM", _text, state_size=4, num_heads=4, head_dim=8, n_groups=1, chunk_size=4)
add("falcon_mamba", "FalconMambaForCausalLM", _text, state_size=4, time_step_rank=4)
add("rwkv", "RwkvForCausalLM", _text, attention_hidden_size=16, context_length=32)
add("recurrent_gemma", "RecurrentGemmaForCausalLM", _text, lru_width=16, attention_window_size=4)
add("lfm2", "Lfm2ForCausalLM", _text, full_attn_idxs=[1], block_auto_adjust_ff_dim=False)
# Encoders.
add("bert", "BertForMaskedLM", _masked)
add("bert_classifier", "BertForSequenceClassification", _classes, type="bert", num_labels=CLASSES)
add("roberta", "RobertaForMaskedLM", _masked)
add("albert", "AlbertForMaskedLM", _masked)
add("distilbert", "DistilBertForMaskedLM", _masked)
add("electra", "ElectraForMaskedLM", _masked)
add("deberta", "DebertaForMaskedLM", _masked)
add("deberta-v2", "DebertaV2ForMaskedLM", _masked)
add("mpnet", "MPNetForMaskedLM", _masked)
add("modernbert", "ModernBertForMaskedLM", _masked)
add("fnet", "FNetForMaskedLM", _masked)
add("squeezebert", "SqueezeBertForMaskedLM", _masked)
add("convbert", "ConvBertForMaskedLM", _masked)
add("esm", "EsmForMaskedLM", _masked, mask_token_id=3)
add("roformer", "RoFormerForMaskedLM", _masked)
add("mobilebert", "MobileBertForMaskedLM", _masked, embedding_size=16, intra_bottleneck_size=16)
# Encoders with decoders.
add("t5", "T5ForConditionalGeneration", _masked, decoder_start_token_id=0)
add("umt5", "UMT5ForConditionalGeneration", _masked)
add("bart", "BartForConditionalGeneration", _masked)
add("mbart", "MBartForConditionalGeneration", _masked)
add("pegasus", "PegasusForConditionalGeneration", _masked)
add("marian", "MarianMTModel", _masked)
add("blenderbot", "BlenderbotForConditionalGeneration", _masked)
add("m2m_100", "M2M100ForConditionalGeneration", _masked)
add(
    "switch_transformers",
    "SwitchTransformersForConditionalGeneration",
    _masked,
    num_sparse_encoder_layers=1,
    num_sparse_decoder_layers=1,
    decoder_start_token_id=0,
)
# Vision.
_classified: dict[str, Any] = {"num_labels": CLASSES}
add("vit", "ViTForImageClassification", _images, **_classified)
add("deit", "DeiTForImageClassification", _images, **_classified)
add("beit", "BeitForImageClassification", _images, **_classified)
add("dinov2", "Dinov2ForImageClassification", _images, **_classified)
add(
    "convnext",
    "ConvNextForImageClassification",
    _images,
    hidden_sizes=[8, 8, 16, 16],
    depths=[1, 1, 1, 1],
    patch_size=2,
    **_classified,
)
add(
    "convnextv2",
    "ConvNextV2ForImageClassification",
    _images,
    hidden_sizes=[8, 8, 16, 16],
    depths=[1, 1, 1, 1],
    patch_size=2,
    **_classified,
)
add(
    "resnet",
    "ResNetForImageClassification",
    _images,
    embedding_size=8,
    hidden_sizes=[8, 16],
    depths=[1, 1],
    **_classified,
)
add(
    "regnet",
    "RegNetForImageClassification",
    _images,
    embedding_size=8,
    hidden_sizes=[8, 16],
    depths=[1, 1],
    groups_width=4,
    **_classified,
)
add(
    "swin",
    "SwinForImageClassification",
    _images,
    embed_dim=8,
    depths=[1, 1],
    num_heads=[2, 2],
    window_size=2,
    patch_size=4,
    **_classified,
)
add(
    "swinv2",
    "Swinv2ForImageClassification",
    _images,
    embed_dim=8,
    depths=[1, 1],
    num_heads=[2, 2],
    window_size=2,
    patch_size=4,
    pretrained_window_sizes=[0, 0],
    **_classified,
)
add(
    "poolformer",
    "PoolFormerForImageClassification",
    _images,
    hidden_sizes=[8, 8, 16, 16],
    depths=[1, 1, 1, 1],
    patch_size=8,
    **_classified,
)
add(
    "segformer",
    "SegformerForImageClassification",
    _images,
    hidden_sizes=[8, 8, 16, 16],
    depths=[1, 1, 1, 1],
    num_attention_heads=[1, 1, 2, 2],
    decoder_hidden_size=16,
    patch_sizes=[3, 3, 3, 3],
    sr_ratios=[1, 1, 1, 1],
    **_classified,
)
add("vit_msn", "ViTMSNForImageClassification", _images, **_classified)
# Audio.
_audio: dict[str, Any] = {
    "conv_dim": [8, 8],
    "conv_kernel": [8, 4],
    "conv_stride": [4, 2],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "num_labels": CLASSES,
    "mask_time_prob": 0.0,
    "feat_proj_dropout": 0.0,
    "layerdrop": 0.0,
    "mask_feature_prob": 0.0,
}
add("wav2vec2", "Wav2Vec2ForSequenceClassification", _waves, **_audio)
add("hubert", "HubertForSequenceClassification", _waves, **_audio)
add("wavlm", "WavLMForSequenceClassification", _waves, **_audio)
add("sew", "SEWForSequenceClassification", _waves, squeeze_factor=2, **_audio)
add(
    "audio-spectrogram-transformer",
    "ASTForAudioClassification",
    _spectrum,
    max_length=24,
    num_mel_bins=16,
    num_labels=CLASSES,
)


def _speech(rows: int, g: Generator) -> dict[str, Tensor]:
    return {"input_features": randn(g, rows, 8, 16), "labels": _tokens(rows, g)}


add("whisper", "WhisperForConditionalGeneration", _speech, num_mel_bins=8, max_source_positions=8)


# Several inputs.
def _pairs(rows: int, g: Generator) -> dict[str, Tensor]:
    return {"input_ids": _tokens(rows, g), "pixel_values": randn(g, rows, 3, IMAGE, IMAGE)}


def _closeness(model: Any, batch: dict[str, Tensor]) -> Tensor:
    outputs = model(**batch)
    return (outputs.image_embeds - outputs.text_embeds).square().mean()


def _contrast(model: Any, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch, return_loss=True).loss
    return loss


add("clip", "CLIPModel", _pairs, _closeness)
add("clip_contrastive", "CLIPModel", _pairs, _contrast, type="clip")
add("siglip", "SiglipModel", _pairs, _closeness)


def _answers(rows: int, g: Generator) -> dict[str, Tensor]:
    return {**_pairs(rows, g), "labels": torch.rand(rows, CLASSES, generator=g)}


add("vilt", "ViltForQuestionAnswering", _answers, num_labels=CLASSES, modality_type_vocab_size=2)


def _captions(rows: int, g: Generator) -> dict[str, Tensor]:
    text = _tokens(rows, g)
    tokens = torch.cat([torch.full((rows, 4), VOCABULARY - 1), text % (VOCABULARY - 1)], dim=1)
    return {"input_ids": tokens, "pixel_values": randn(g, rows, 3, IMAGE, IMAGE), "labels": tokens}


add("git", "GitForCausalLM", _captions, num_image_with_embedding=None)

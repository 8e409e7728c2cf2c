"""Further architectures of `transformers`, made small without sizes of their own: every integer by its name.

`python -m benchmarks.matrix.zoo` tries all heads that the installed version has, and prints those that can be
built, fed and trained, for :data:`FOUND`.
"""

from __future__ import annotations

import dataclasses
import inspect
import signal
from collections.abc import Callable, Iterator
from functools import cache
from types import FrameType
from typing import Any

import torch
from torch import Generator, Tensor, nn

from .architectures import ARCHITECTURES, CLASSES, SIZES, _classes, _images, _masked, _text, _waves, own_loss, tiny
from .network import Network, Registry

MAX_PARAMETERS = 3_000_000
TRIAL_SECONDS = 30
DATA: dict[str, Callable[[int, Generator], Any]] = {
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": _text,
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES": _masked,
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES": _masked,
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES": _classes,
    "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES": lambda n, g: {**_masked(n, g), "labels": _text(n, g)["labels"] % 3},
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES": _images,
    "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES": _waves,
}
"""What the heads of a mapping are fed with."""
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"num_key_value_heads": 4, "head_dim": 4, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4},
    {"num_key_value_heads": 4, "head_dim": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8},
    {"layer_types": ["full_attention", "sliding_attention"]},
    {"num_experts_per_tok": 1},
    {"decoder_start_token_id": 0, "is_decoder": True, "mask_length": 1, "mask_time_length": 1},
)
"""Values that are tried in turn, as far as a configuration has them."""


def given_of(kind: Any, variant: dict[str, Any]) -> dict[str, Any]:
    """Return small values for the fields of a configuration that `SIZES` does not know, or that are lists."""
    given: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        default = _default(field)
        if field.name in variant:
            given[field.name] = variant[field.name]
        elif isinstance(default, (list, tuple)):
            if (small := _small_list(field.name, default)) is not None:
                given[field.name] = small
        elif field.name not in SIZES and isinstance(default, int) and not isinstance(default, bool):
            given[field.name] = _small(field.name, default)
    given["num_labels"] = CLASSES
    return given


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


def _small(name: str, default: int) -> int:
    if name.endswith("heads"):
        return min(default, 4)
    if name.startswith("num_") and name.endswith(("layers", "blocks")):
        return min(default, 2)
    is_width = any(part in name for part in ("dim", "size", "channels", "rank", "width", "planes", "ffn"))
    return 16 if is_width and default > 32 else default


def _small_list(name: str, default: Any) -> Any:
    if not default or not all(isinstance(value, int) and not isinstance(value, bool) for value in default):
        return None
    if any(part in name for part in ("depth", "layers", "blocks")):
        return type(default)(1 for _ in default)
    if "heads" in name:
        return type(default)(min(value, 2) for value in default)
    if max(default) >= 32:
        return type(default)(8 if place == 0 else 16 for place in range(len(default)))
    return None


def build(model_type: str, head: str, variant: int) -> nn.Module:
    """Return a small network; its configuration is made from the variant of this number."""
    import transformers

    given = given_of(transformers.CONFIG_MAPPING[model_type], VARIANTS[variant])
    config = tiny(model_type, **given)
    # The grouped matrix product of CPUs knows no double precision.
    config._experts_implementation = "eager"
    made: nn.Module = getattr(transformers, head)(config)
    return made


ZOO = Registry("zoo")


@cache
def _common_source() -> str:
    return repr(VARIANTS) + "".join(map(inspect.getsource, (given_of, _small, _small_list, build)))


def _add(mapping: str, variant: int, model_type: str, head: str) -> None:
    data = DATA[mapping]

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

    def make() -> Network:
        return Network(
            model=lambda: build(model_type, head, variant),
            data=data,
            loss=own_loss,
            optimizer=optimizer,
            rows=11,
            rounding=1e-3,
        )

    ZOO.add_as(head, make, repr((mapping, model_type, head, variant)) + _common_source())


def search(known: set[str]) -> Iterator[tuple[str, str, str, int]]:
    """Yield the mapping, type, head and variant of every architecture that can be trained; not those that are known."""
    from transformers.models.auto import modeling_auto

    for mapping in DATA:
        for model_type, heads in getattr(modeling_auto, mapping).items():
            head = heads if isinstance(heads, str) else heads[0]
            for variant in range(len(VARIANTS)) if head not in known else ():
                if _can_train(mapping, model_type, head, variant):
                    yield mapping, model_type, head, variant
                    break


def _can_train(mapping: str, model_type: str, head: str, variant: int) -> bool:
    previous = signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(TRIAL_SECONDS)
    try:
        with torch.device("meta"):
            if sum(weight.numel() for weight in build(model_type, head, variant).parameters()) > MAX_PARAMETERS:
                return False
        model = build(model_type, head, variant).double()
        batch = DATA[mapping](4, torch.Generator().manual_seed(1))
        loss: Tensor = model(**{k: v.double() if v.is_floating_point() else v for k, v in batch.items()}).loss
        loss.backward()  # type: ignore[no-untyped-call]
        return bool(torch.isfinite(loss)) and any(weight.grad is not None for weight in model.parameters())
    except Exception:
        # What a library refuses to build or to feed is not part of the matrix.
        return False
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def _too_long(number: int, frame: FrameType | None) -> None:
    raise TimeoutError


FOUND: dict[tuple[str, int], str] = {
    ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", 0): """
        afmoe/AfmoeForCausalLM apertus/ApertusForCausalLM arcee/ArceeForCausalLM aria_text/AriaTextForCausalLM
        bailing_hybrid/BailingHybridForCausalLM bamba/BambaForCausalLM bart/BartForCausalLM beam/BeamForCausalLM
        bert/BertLMHeadModel bert-generation/BertGenerationDecoder big_bird/BigBirdForCausalLM
        bigbird_pegasus/BigBirdPegasusForCausalLM bitnet/BitNetForCausalLM blenderbot/BlenderbotForCausalLM
        blenderbot-small/BlenderbotSmallForCausalLM camembert/CamembertForCausalLM
        cohere2_moe/Cohere2MoeForCausalLM cpmant/CpmAntForCausalLM cwm/CwmForCausalLM
        data2vec-text/Data2VecTextForCausalLM doge/DogeForCausalLM electra/ElectraForCausalLM
        ernie/ErnieForCausalLM ernie4_5/Ernie4_5ForCausalLM ernie4_5_moe/Ernie4_5_MoeForCausalLM
        exaone4/Exaone4ForCausalLM exaone_moe/ExaoneMoeForCausalLM falcon_h1/FalconH1ForCausalLM
        flex_olmo/FlexOlmoForCausalLM flint/FlintForCausalLM gemma4_unified_text/Gemma4UnifiedForCausalLM
        glm4_moe/Glm4MoeForCausalLM gpt_neox_japanese/GPTNeoXJapaneseForCausalLM
        granite_swa/GraniteSWAForCausalLM granitemoe_swa/GraniteMoeSWAForCausalLM
        granitemoehybrid/GraniteMoeHybridForCausalLM granitemoeshared/GraniteMoeSharedForCausalLM
        hrm_text/HrmTextForCausalLM hunyuan_v1_dense/HunYuanDenseV1ForCausalLM
        hunyuan_v1_moe/HunYuanMoEV1ForCausalLM hy_v3/HYV3ForCausalLM hy_v4/HYV4ForCausalLM
        hyperclovax/HyperCLOVAXForCausalLM inkling_text/InklingForCausalLM jais2/Jais2ForCausalLM
        jamba/JambaForCausalLM kimi_linear/KimiLinearForCausalLM kolibri1/Kolibri1ForCausalLM
        laguna/LagunaForCausalLM llama4_text/Llama4ForCausalLM marian/MarianForCausalLM mbart/MBartForCausalLM
        megatron-bert/MegatronBertForCausalLM mellum/MellumForCausalLM mimo_v2_flash/MiMoV2FlashForCausalLM
        minimax/MiniMaxForCausalLM minimax_m2/MiniMaxM2ForCausalLM minimax_m3_vl_text/MiniMaxM3VLForCausalLM
        ministral/MinistralForCausalLM ministral3/Ministral3ForCausalLM mllama/MllamaForCausalLM
        modernbert-decoder/ModernBertDecoderForCausalLM mvp/MvpForCausalLM nanochat/NanoChatForCausalLM
        olmo_hybrid/OlmoHybridForCausalLM pegasus/PegasusForCausalLM plbart/PLBartForCausalLM
        prophetnet/ProphetNetForCausalLM qwen3_5_moe_text/Qwen3_5MoeForCausalLM qwen3_5_text/Qwen3_5ForCausalLM
        qwen3_next/Qwen3NextForCausalLM qwen4_exp_text/Qwen4ExpForCausalLM rembert/RemBertForCausalLM
        roberta/RobertaForCausalLM roberta-prelayernorm/RobertaPreLayerNormForCausalLM
        roc_bert/RoCBertForCausalLM roformer/RoFormerForCausalLM seed_oss/SeedOssForCausalLM
        solar_open/SolarOpenForCausalLM trocr/TrOCRForCausalLM vaultgemma/VaultGemmaForCausalLM
        whisper/WhisperForCausalLM xlm/XLMWithLMHeadModel xlm-roberta/XLMRobertaForCausalLM
        xlm-roberta-xl/XLMRobertaXLForCausalLM xlstm/xLSTMForCausalLM
    """,
    ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", 1): """
        axk2/AXK2ForCausalLM deepseek_v2/DeepseekV2ForCausalLM deepseek_v32/DeepseekV32ForCausalLM
        glm4_moe_lite/Glm4MoeLiteForCausalLM glm_moe_dsa/GlmMoeDsaForCausalLM
        longcat_flash/LongcatFlashForCausalLM minicpm3/MiniCPM3ForCausalLM youtu/YoutuForCausalLM
    """,
    ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", 2): """
        deepseek_v4/DeepseekV4ForCausalLM
    """,
    ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", 3): """
        lfm2_moe/Lfm2MoeForCausalLM
    """,
    ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", 4): """
        zaya/ZayaForCausalLM
    """,
    ("MODEL_FOR_MASKED_LM_MAPPING_NAMES", 0): """
        big_bird/BigBirdForMaskedLM camembert/CamembertForMaskedLM data2vec-text/Data2VecTextForMaskedLM
        ernie/ErnieForMaskedLM eurobert/EuroBertForMaskedLM flaubert/FlaubertWithLMHeadModel
        funnel/FunnelForMaskedLM gte/GteForMaskedLM ibert/IBertForMaskedLM
        jina_embeddings_v3/JinaEmbeddingsV3ForMaskedLM layoutlm/LayoutLMForMaskedLM
        longformer/LongformerForMaskedLM luke/LukeForMaskedLM megatron-bert/MegatronBertForMaskedLM
        mvp/MvpForConditionalGeneration nomic_bert/NomicBertForMaskedLM rembert/RemBertForMaskedLM
        roberta-prelayernorm/RobertaPreLayerNormForMaskedLM roc_bert/RoCBertForMaskedLM tapas/TapasForMaskedLM
        ultrabert/UltrabertForMaskedLM xlm-roberta/XLMRobertaForMaskedLM xlm-roberta-xl/XLMRobertaXLForMaskedLM
        yoso/YosoForMaskedLM
    """,
    ("MODEL_FOR_MASKED_LM_MAPPING_NAMES", 1): """
        esmc/EsmcForMaskedLM
    """,
    ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", 0): """
        bigbird_pegasus/BigBirdPegasusForConditionalGeneration
        blenderbot-small/BlenderbotSmallForConditionalGeneration led/LEDForConditionalGeneration
        mt5/MT5ForConditionalGeneration nllb-moe/NllbMoeForConditionalGeneration
        pegasus_x/PegasusXForConditionalGeneration plbart/PLBartForConditionalGeneration
        prophetnet/ProphetNetForConditionalGeneration seamless_m4t/SeamlessM4TForTextToText
        seamless_m4t_v2/SeamlessM4Tv2ForTextToText t5gemma/T5GemmaForConditionalGeneration
    """,
    ("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES", 0): """
        albert/AlbertForSequenceClassification arcee/ArceeForSequenceClassification
        big_bird/BigBirdForSequenceClassification biogpt/BioGptForSequenceClassification
        bloom/BloomForSequenceClassification camembert/CamembertForSequenceClassification
        convbert/ConvBertForSequenceClassification ctrl/CTRLForSequenceClassification
        data2vec-text/Data2VecTextForSequenceClassification deberta/DebertaForSequenceClassification
        deberta-v2/DebertaV2ForSequenceClassification diffllama/DiffLlamaForSequenceClassification
        distilbert/DistilBertForSequenceClassification doge/DogeForSequenceClassification
        electra/ElectraForSequenceClassification ernie/ErnieForSequenceClassification
        esm/EsmForSequenceClassification eurobert/EuroBertForSequenceClassification
        exaone4/Exaone4ForSequenceClassification falcon/FalconForSequenceClassification
        flaubert/FlaubertForSequenceClassification fnet/FNetForSequenceClassification
        funnel/FunnelForSequenceClassification gemma/GemmaForSequenceClassification
        gemma2/Gemma2ForSequenceClassification gemma3_text/Gemma3TextForSequenceClassification
        glm/GlmForSequenceClassification glm4/Glm4ForSequenceClassification
        gpt-sw3/GPT2ForSequenceClassification gpt_bigcode/GPTBigCodeForSequenceClassification
        gpt_neox/GPTNeoXForSequenceClassification gpt_oss/GptOssForSequenceClassification
        gte/GteForSequenceClassification helium/HeliumForSequenceClassification
        hunyuan_v1_dense/HunYuanDenseV1ForSequenceClassification
        hunyuan_v1_moe/HunYuanMoEV1ForSequenceClassification ibert/IBertForSequenceClassification
        jamba/JambaForSequenceClassification jetmoe/JetMoeForSequenceClassification
        jina_embeddings_v3/JinaEmbeddingsV3ForSequenceClassification layoutlm/LayoutLMForSequenceClassification
        llama/LlamaForSequenceClassification longformer/LongformerForSequenceClassification
        luke/LukeForSequenceClassification markuplm/MarkupLMForSequenceClassification
        megatron-bert/MegatronBertForSequenceClassification minimax/MiniMaxForSequenceClassification
        ministral/MinistralForSequenceClassification ministral3/Ministral3ForSequenceClassification
        mistral/MistralForSequenceClassification mixtral/MixtralForSequenceClassification
        mobilebert/MobileBertForSequenceClassification modernbert/ModernBertForSequenceClassification
        modernbert-decoder/ModernBertDecoderForSequenceClassification mpnet/MPNetForSequenceClassification
        mpt/MptForSequenceClassification nemotron/NemotronForSequenceClassification
        nomic_bert/NomicBertForSequenceClassification olmo/OlmoForSequenceClassification
        olmo2/Olmo2ForSequenceClassification olmo3/Olmo3ForSequenceClassification
        openai-gpt/OpenAIGPTForSequenceClassification opt/OPTForSequenceClassification
        persimmon/PersimmonForSequenceClassification phi/PhiForSequenceClassification
        phi3/Phi3ForSequenceClassification phimoe/PhimoeForSequenceClassification
        qwen2/Qwen2ForSequenceClassification qwen2_moe/Qwen2MoeForSequenceClassification
        qwen3/Qwen3ForSequenceClassification qwen3_5/Qwen3_5ForSequenceClassification
        qwen3_5_text/Qwen3_5TextForSequenceClassification qwen3_moe/Qwen3MoeForSequenceClassification
        qwen3_next/Qwen3NextForSequenceClassification rembert/RemBertForSequenceClassification
        roberta/RobertaForSequenceClassification
        roberta-prelayernorm/RobertaPreLayerNormForSequenceClassification
        roc_bert/RoCBertForSequenceClassification roformer/RoFormerForSequenceClassification
        seed_oss/SeedOssForSequenceClassification smollm3/SmolLM3ForSequenceClassification
        squeezebert/SqueezeBertForSequenceClassification stablelm/StableLmForSequenceClassification
        starcoder2/Starcoder2ForSequenceClassification t5gemma/T5GemmaForSequenceClassification
        tapas/TapasForSequenceClassification ultrabert/UltrabertForSequenceClassification
        xlm/XLMForSequenceClassification xlm-roberta/XLMRobertaForSequenceClassification
        xlm-roberta-xl/XLMRobertaXLForSequenceClassification xlnet/XLNetForSequenceClassification
        yoso/YosoForSequenceClassification
    """,
    ("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES", 1): """
        axk2/AXK2ForSequenceClassification deepseek_v2/DeepseekV2ForSequenceClassification
        deepseek_v3/DeepseekV3ForSequenceClassification esmc/EsmcForSequenceClassification
        minicpm3/MiniCPM3ForSequenceClassification mistral4/Mistral4ForSequenceClassification
    """,
    ("MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES", 0): """
        albert/AlbertForTokenClassification apertus/ApertusForTokenClassification
        arcee/ArceeForTokenClassification bert/BertForTokenClassification big_bird/BigBirdForTokenClassification
        biogpt/BioGptForTokenClassification bloom/BloomForTokenClassification
        camembert/CamembertForTokenClassification convbert/ConvBertForTokenClassification
        data2vec-text/Data2VecTextForTokenClassification deberta/DebertaForTokenClassification
        deberta-v2/DebertaV2ForTokenClassification diffllama/DiffLlamaForTokenClassification
        distilbert/DistilBertForTokenClassification electra/ElectraForTokenClassification
        ernie/ErnieForTokenClassification esm/EsmForTokenClassification eurobert/EuroBertForTokenClassification
        exaone4/Exaone4ForTokenClassification falcon/FalconForTokenClassification
        flaubert/FlaubertForTokenClassification fnet/FNetForTokenClassification
        funnel/FunnelForTokenClassification gemma/GemmaForTokenClassification
        gemma2/Gemma2ForTokenClassification glm/GlmForTokenClassification glm4/Glm4ForTokenClassification
        gpt-sw3/GPT2ForTokenClassification gpt_bigcode/GPTBigCodeForTokenClassification
        gpt_neox/GPTNeoXForTokenClassification gpt_oss/GptOssForTokenClassification
        gte/GteForTokenClassification helium/HeliumForTokenClassification ibert/IBertForTokenClassification
        jina_embeddings_v3/JinaEmbeddingsV3ForTokenClassification layoutlm/LayoutLMForTokenClassification
        llama/LlamaForTokenClassification longformer/LongformerForTokenClassification
        luke/LukeForTokenClassification markuplm/MarkupLMForTokenClassification
        megatron-bert/MegatronBertForTokenClassification minimax/MiniMaxForTokenClassification
        ministral/MinistralForTokenClassification ministral3/Ministral3ForTokenClassification
        mistral/MistralForTokenClassification mixtral/MixtralForTokenClassification
        mobilebert/MobileBertForTokenClassification modernbert/ModernBertForTokenClassification
        mpnet/MPNetForTokenClassification mpt/MptForTokenClassification mt5/MT5ForTokenClassification
        nemotron/NemotronForTokenClassification nomic_bert/NomicBertForTokenClassification
        openai_privacy_filter/OpenAIPrivacyFilterForTokenClassification
        persimmon/PersimmonForTokenClassification phi/PhiForTokenClassification phi3/Phi3ForTokenClassification
        qwen2/Qwen2ForTokenClassification qwen2_moe/Qwen2MoeForTokenClassification
        qwen3/Qwen3ForTokenClassification qwen3_5/Qwen3_5ForTokenClassification
        qwen3_moe/Qwen3MoeForTokenClassification qwen3_next/Qwen3NextForTokenClassification
        rembert/RemBertForTokenClassification roberta/RobertaForTokenClassification
        roberta-prelayernorm/RobertaPreLayerNormForTokenClassification roc_bert/RoCBertForTokenClassification
        roformer/RoFormerForTokenClassification seed_oss/SeedOssForTokenClassification
        smollm3/SmolLM3ForTokenClassification squeezebert/SqueezeBertForTokenClassification
        stablelm/StableLmForTokenClassification starcoder2/Starcoder2ForTokenClassification
        t5/T5ForTokenClassification t5gemma/T5GemmaForTokenClassification
        ultrabert/UltrabertForTokenClassification umt5/UMT5ForTokenClassification xlm/XLMForTokenClassification
        xlm-roberta/XLMRobertaForTokenClassification xlm-roberta-xl/XLMRobertaXLForTokenClassification
        xlnet/XLNetForTokenClassification yoso/YosoForTokenClassification
    """,
    ("MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES", 1): """
        axk2/AXK2ForTokenClassification deepseek_v3/DeepseekV3ForTokenClassification
        esmc/EsmcForTokenClassification mistral4/Mistral4ForTokenClassification
    """,
    ("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", 0): """
        clip/CLIPForImageClassification data2vec-vision/Data2VecVisionForImageClassification
        dinov2_with_registers/Dinov2WithRegistersForImageClassification focalnet/FocalNetForImageClassification
        ijepa/IJepaForImageClassification metaclip_2/MetaClip2ForImageClassification
        mobilenet_v2/MobileNetV2ForImageClassification mobilevit/MobileViTForImageClassification
        siglip/SiglipForImageClassification swiftformer/SwiftFormerForImageClassification
    """,
    ("MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES", 5): """
        data2vec-audio/Data2VecAudioForSequenceClassification
    """,
    ("MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES", 0): """
        unispeech/UniSpeechForSequenceClassification unispeech-sat/UniSpeechSatForSequenceClassification
        wav2vec2-conformer/Wav2Vec2ConformerForSequenceClassification
    """,
}
"""Type and head of every architecture that was found, by what it is fed with and its variant."""
for (_mapping, _variant), _names in FOUND.items():
    for _name in _names.split():
        _add(_mapping, _variant, *_name.split("/"))


if __name__ == "__main__":
    known = {entry.source.split("'")[3] for entry in ARCHITECTURES.values()}
    for one in search(known):
        print(*one, flush=True)

"""Architectures of models that are served: one table of the names in vLLM's registry, with a reason for each refusal.

A model's config.json names an architecture. vLLM's registry says which names vLLM can load; the table says which of the
names Staccato serves, and config.json says in which form the model comes. `refusal` is asked before a weight is fetched
or read. `deploy/docs/manual/architectures.md` shows the table, and a test compares the table with vLLM's registry.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import msgspec

from store.contract.tasks import Task


class Support(Enum):
    """Staccato's support of an architecture. The value is the word that people read."""

    SERVED = "served"
    PICTURES = "served, with pictures"
    TEXT = "served as text"
    EMBEDS = "served, makes embeddings"
    SCORES = "served, makes scores"
    NOT_YET = "not yet"


class Served(msgspec.Struct, frozen=True):
    """A line of the table: the support of an architecture, and the reason why Staccato does no more."""

    support: Support
    measured: bool = False  # the tokens were equal to bare vLLM's
    text_measured: bool = False  # the tokens of a model with pictures, served without pictures, were equal
    reason: str = ""


class Known(msgspec.Struct, frozen=True):
    """Names in a config.json for which this version's vLLM has code of its own.

    model_types: values of `model_type`, each with a class that reads config.json; None: any value will do."""

    architectures: frozenset[str]
    model_types: frozenset[str] | None = None


class ModelForm(msgspec.Struct, frozen=True):
    """Fields of config.json, or of its text_config, that decide whether an architecture is served in this form."""

    layer_types: Any = None  # a kind for each layer
    is_encoder_decoder: Any = None


POOLED = "no embeddings, scores or labels of this architecture were ever compared here with those of bare vLLM"
TOKENWISE = "the model answers with a vector or a label for each token, and Staccato sends one answer for each text"
DRAFTS = "the model drafts tokens for a larger model, and Staccato does not run drafts: deploy the larger model alone"
INSIDE = "the name is one that vLLM uses inside: give the model's original config.json"
UNBUILT = "no model of this architecture was ever built here and compared with bare vLLM"
UNTRIED = "and answers of this architecture were never compared with those of bare vLLM"
STATE = f"some layers keep a state for each request (Mamba, linear attention, convolution), {UNTRIED}"
LATENT = f"the model keeps a latent vector for each token (MLA), {UNTRIED}"
SPARSE = "the model's sparse attention keeps an index or a compressed copy beside keys and values"
SPEECH = "the model writes down speech, and Staccato has no endpoint that takes sound"
ENCODER = "an encoder reads the input, and a decoder keeps the encoder's keys and values for each request"
ACTIONS = "the model answers with a robot's actions, and Staccato has no endpoint for these answers"
DIFFUSION = "the model writes many tokens at a time by diffusion, and Staccato's steps make tokens one after another"
PREFIX = "each token of a prompt attends to the whole prompt, and Staccato computes long prompts in parts"
UNLOADED = "this version's vLLM does not load the model as published: wait for another version of vLLM"
MISTRAL = "vLLM reads the model from Mistral's own params.json alone, which Staccato does not take"
REMOTE = "the model's config.json can be read with program code alone, which Staccato never runs"
LACKING = "vLLM's code of the model needs a package (timm or torchaudio) that Staccato's set-up leaves out"
DEAF = "sound and video are left out"

_TEXT_MEASURED = """
AfmoeForCausalLM ApertusForCausalLM ArceeForCausalLM BloomForCausalLM Cohere2ForCausalLM Cohere2MoeForCausalLM
CohereForCausalLM CwmForCausalLM Ernie4_5ForCausalLM Ernie4_5_MoeForCausalLM Exaone4ForCausalLM ExaoneMoEForCausalLM
ExaoneMoeForCausalLM FalconForCausalLM FlexOlmoForCausalLM GPT2LMHeadModel GPTBigCodeForCausalLM GPTJForCausalLM
GPTNeoXForCausalLM Gemma2ForCausalLM Gemma3ForCausalLM Gemma3nForCausalLM Gemma4ForCausalLM GemmaForCausalLM
Glm4ForCausalLM Glm4MoeForCausalLM GlmForCausalLM GptOssForCausalLM GraniteForCausalLM GraniteMoeForCausalLM
GraniteMoeSWAForCausalLM GraniteMoeSharedForCausalLM GraniteSWAForCausalLM HYV3ForCausalLM HunYuanDenseV1ForCausalLM
HunYuanMoEV1ForCausalLM HyperCLOVAXForCausalLM Jais2ForCausalLM LLaMAForCausalLM Llama4ForCausalLM LlamaForCausalLM
MellumForCausalLM MiMoV2FlashForCausalLM MiniCPM3ForCausalLM MiniMaxM2ForCausalLM Ministral3ForCausalLM
MistralForCausalLM MixtralForCausalLM NemotronForCausalLM OPTForCausalLM Olmo2ForCausalLM Olmo3ForCausalLM
OlmoForCausalLM OlmoeForCausalLM Phi3ForCausalLM PhiForCausalLM PhiMoEForCausalLM Qwen2ForCausalLM Qwen2MoeForCausalLM
Qwen3ForCausalLM Qwen3MoeForCausalLM SeedOssForCausalLM SmolLM3ForCausalLM StableLmForCausalLM Starcoder2ForCausalLM
VaultGemmaForCausalLM
"""
_STATES_MEASURED = """
FalconH1ForCausalLM GraniteMoeHybridForCausalLM Lfm2ForCausalLM Lfm2MoeForCausalLM Mamba2ForCausalLM
NemotronHForCausalLM Qwen3NextForCausalLM Qwen3_5ForCausalLM Qwen3_5MoeForCausalLM Zamba2ForCausalLM
"""
_LATENT_MEASURED = "DeepseekV2ForCausalLM DeepseekV3ForCausalLM Glm4MoeLiteForCausalLM"
_PICTURES_MEASURED = """
Qwen2_5_VLForConditionalGeneration Qwen3VLForConditionalGeneration SmolVLMForConditionalGeneration
"""
_PICTURES_TEXT_MEASURED = """
AriaForConditionalGeneration Blip2ForConditionalGeneration Cohere2VisionForConditionalGeneration
Exaone4_5_ForConditionalGeneration Gemma3ForConditionalGeneration Glm4vForConditionalGeneration
Glm4vMoeForConditionalGeneration GlmOcrForConditionalGeneration Idefics3ForConditionalGeneration
InternVLForConditionalGeneration LightOnOCRForConditionalGeneration Llama4ForConditionalGeneration
LlavaForConditionalGeneration LlavaNextForConditionalGeneration LlavaOnevisionForConditionalGeneration
Mistral3ForConditionalGeneration MuseGlimmerForConditionalGeneration PaddleOCRVLForConditionalGeneration
PaliGemmaForConditionalGeneration Qwen2VLForConditionalGeneration Qwen3VLMoeForConditionalGeneration
"""
_PICTURES_STATES_TEXT_MEASURED = """
Lfm2VlForConditionalGeneration Qwen3_5ForConditionalGeneration Qwen3_5MoeForConditionalGeneration
"""
_PICTURES_DEAF_TEXT_MEASURED = """
Gemma4ForConditionalGeneration Gemma4UnifiedForConditionalGeneration Qwen2_5OmniForConditionalGeneration
Qwen2_5OmniModel Qwen3OmniMoeForConditionalGeneration
"""
# Encoders keep nothing between two steps: each token attends to the whole text, and a text is computed in one step.
_ENCODERS_EMBED_MEASURED = "BertModel ModernBertModel RobertaModel XLMRobertaModel"
_ENCODERS_SCORE_MEASURED = """
BertForSequenceClassification ModernBertForSequenceClassification RobertaForSequenceClassification
XLMRobertaForSequenceClassification
"""
_DECODERS_EMBED_MEASURED = "LlamaModel MistralModel Qwen2Model"
# Decoders that make text, and embeddings if the model comes with the file modules.json of sentence-transformers.
EITHER_MEASURED = frozenset("LlamaForCausalLM MistralForCausalLM Qwen2ForCausalLM Qwen3ForCausalLM".split())
_DEAF_MEASURED = """
AudioFlamingo3ForConditionalGeneration GraniteSpeechForConditionalGeneration GraniteSpeechPlusForConditionalGeneration
LlavaNextVideoForConditionalGeneration Qwen2AudioForConditionalGeneration
"""
_REFUSED = {
    UNBUILT: """
AliceAIForCausalLM Alpamayo2Super BagelForConditionalGeneration BeamForCausalLM ChatGLMForConditionalGeneration
ChatGLMModel CohereCompassForConditionalGeneration Cosmos3EdgeForConditionalGeneration Cosmos3ForConditionalGeneration
DeepseekOCR2ForCausalLM DeepseekOCRForCausalLM DomynEdgeForCausalLM DoryForCausalLM Emu3ForConditionalGeneration
Ernie4_5_VLMoeForConditionalGeneration FlintForCausalLM FunAudioChatForConditionalGeneration GLM4VForCausalLM
Gemma3nForConditionalGeneration Granite4VisionForConditionalGeneration HCXVisionV2ForCausalLM
HunYuanVLForConditionalGeneration InklingForCausalLM InklingForConditionalGeneration IsaacForConditionalGeneration
K2HorizonForCausalLM Kolibri1ForCausalLM LagunaForCausalLM MiniCPMOcrForConditionalGeneration Moondream3ForCausalLM
MuseGlimmerForCausalLM MuseSparkForConditionalGeneration Ovis QianfanOCRForConditionalGeneration
RadioMBartPrefixForCausalLM Rnj1ForCausalLM Step3TextForCausalLM Step3VLForConditionalGeneration Step3p5ForCausalLM
Step3p7ForConditionalGeneration Step5ForCausalLM Step5ForConditionalGeneration UltravoxModel UnlimitedOCRForCausalLM
""",
    STATE: """
BailingMoeV2_5ForCausalLM BailingMoeV3ForCausalLM BailingMoeV3VLForConditionalGeneration FalconMambaForCausalLM
Glm5NextForCausalLM Glm5NextForConditionalGeneration InternS2MobiusForConditionalGeneration
InternS2PreviewForConditionalGeneration JambaForCausalLM KimiK3ForConditionalGeneration KimiLinearForCausalLM
MambaForCausalLM MiniCPMV4_6ForConditionalGeneration MiniCPMV4_7ForConditionalGeneration
NemotronHPuzzleForCausalLM NemotronH_Nano_Omni_Reasoning_V3 NemotronH_Nano_VL_V2 NemotronH_Omni_Reasoning_V3
NemotronH_Super_Omni_Reasoning_V3 OlmoHybridForCausalLM Qwen4ExpForCausalLM Qwen4ExpForConditionalGeneration
""",
    LATENT: """
AXK1ForCausalLM DeepseekVLV2ForCausalLM KimiK25ForConditionalGeneration KimiVLForConditionalGeneration
LongcatFlashForCausalLM LongcatFlashNgramForCausalLM MistralLarge3ForCausalLM PanguUltraMoEForCausalLM
SarvamMLAForCausalLM
""",
    SPARSE: """
DeepseekV32ForCausalLM DeepseekV41ForCausalLM DeepseekV4ForCausalLM DeepseekV4ForConditionalGeneration
Dots3NoteForCausalLM GlmMoeDsaForCausalLM HYV4ForCausalLM MiniMaxM3SparseForCausalLM
MiniMaxM3SparseForConditionalGeneration
""",
    SPEECH: """
FireRedASR2ForConditionalGeneration FunASRForConditionalGeneration GlmAsrForConditionalGeneration
MossTranscribeDiarizeForConditionalGeneration Qwen3ASRForConditionalGeneration Qwen3ASRRealtimeGeneration
VibeVoiceAsrForConditionalGeneration VoxtralRealtimeGeneration
""",
    ENCODER: "CohereAsrForConditionalGeneration NemotronParseForConditionalGeneration WhisperForConditionalGeneration",
    REMOTE: """
BailingMoeForCausalLM BailingMoeV2ForCausalLM BeeForConditionalGeneration DeciLMForCausalLM DeepseekForCausalLM
DotsOCRForCausalLM Eagle2_5_VLForConditionalGeneration ExaoneForCausalLM H2OVLChatModel HfMoondream
IQuestCoderForCausalLM IQuestLoopCoderForCausalLM InternLM2ForCausalLM InternLM3ForCausalLM
InternS1ForConditionalGeneration InternS1ProForConditionalGeneration InternVLChatModel KeyeForConditionalGeneration
KeyeVL1_5ForConditionalGeneration Llama_Nemotron_Nano_VL LlavaOnevision2ForConditionalGeneration MiMoForCausalLM
MiMoV2ForCausalLM MiMoV2OmniForCausalLM MiniCPMForCausalLM MiniCPMO MiniCPMV Molmo2ForConditionalGeneration
MolmoForCausalLM MoonshotKimiaForCausalLM MossAudioModel NVLM_D NanbeigeForCausalLM OpenCUAForConditionalGeneration
OpenPanguVLForConditionalGeneration OrionForCausalLM Ovis2_5 Ovis2_6ForCausalLM Ovis2_6_MoeForCausalLM
PanguEmbeddedForCausalLM PanguProMoEV2ForCausalLM Param2MoEForCausalLM Phi3VForCausalLM Phi4ForCausalLMV
Phi4MMForCausalLM Plamo3ForCausalLM RForConditionalGeneration SarvamMoEForCausalLM SkyworkR1VChatModel SolarForCausalLM
Step1ForCausalLM StepVLForConditionalGeneration TeleChat2ForCausalLM TeleChat3ForCausalLM TeleFLMForCausalLM
""",
    ACTIONS: "OpenVLAForActionPrediction",
    MISTRAL: "PixtralForConditionalGeneration VoxtralForConditionalGeneration",
    PREFIX: "HrmTextForCausalLM",
    DIFFUSION: "DiffusionGemmaForBlockDiffusion",
    LACKING: "KananaVForConditionalGeneration MiDashengLMModel",
    UNLOADED: "DbrxForCausalLM",
    INSIDE: """
TransformersEmbeddingModel TransformersForCausalLM TransformersForMTP TransformersForSequenceClassification
TransformersMoEEmbeddingModel TransformersMoEForCausalLM TransformersMoEForMTP TransformersMoEForSequenceClassification
TransformersMultiModalEmbeddingModel TransformersMultiModalForCausalLM TransformersMultiModalForSequenceClassification
TransformersMultiModalMoEForCausalLM
""",
    DRAFTS: """
BailingMoeV25MTPModel BailingMoeV3MTPModel DFlash2BeamDraftModel DFlash2DraftModel DFlashDraftModel
DFlashLagunaForCausalLM DFlashMuseGlimmerAssistantModel DFlashQwen3XPressModel DSparkDraftModel DSparkV41DraftModel
DeepSeekMTPModel DeepSeekV4MTPModel DeepseekV32MTPModel Dots3NoteMTPModel Eagle3DeepseekV2ForCausalLM
Eagle3DeepseekV3ForCausalLM Eagle3LlamaForCausalLM Eagle3MiniMaxM2ForCausalLM Eagle3Qwen2_5vlForCausalLM
Eagle3Qwen3ForCausalLM Eagle3Qwen3vlForCausalLM EagleCohereForCausalLM EagleDeepSeekMTPModel EagleLlama4ForCausalLM
EagleLlamaForCausalLM EagleMiniCPMForCausalLM EagleMistralForCausalLM EagleMistralLarge3ForCausalLM ErnieMTPModel
Exaone4_5_MTP ExaoneMoeMTP ExtractHiddenStatesModel Gemma4DSparkModel Gemma4MTPModel Glm4MoeLiteMTPModel Glm4MoeMTPModel
Glm5NextMTPModel GlmOcrMTPModel HYV3MTPModel HYV4MTPModel InklingMTPModel InternS2MobiusMTP K3DSparkModel KimiK3MTPModel
LiLiCorrDraftModel LlamaForCausalLMEagle3 LongCatFlashMTPModel MedusaModel MiMoMTPModel MiMoV2MTPModel
MiMoV2OmniMTPModel MiniMaxM3MTP MuseGlimmerAssistantModel MuseSparkDSparkModel NemotronHMTPModel OpenPanguMTPModel
PEagleDraftModel ParseAuxMTPModel PeagleLlamaForCausalLM PeagleQwen3ForCausalLM Qwen3DSparkModel Qwen3NextMTP
Qwen3OmniDSparkModel Qwen3XPressModel Qwen3_5MTP Qwen3_5MoeMTP Qwen4ExpMTP Step3p5MTP Step5MTP
""",
    POOLED: """
CLIPModel D3ForSequenceClassification DeepseekV3BidirectionalModel EmbeddingGemma2Model GPT2ForSequenceClassification
Gemma2Model Gemma3TextModel GteModel GteNewForSequenceClassification GteNewModel InternLM2ForRewardModel
JambaForSequenceClassification JinaEmbeddingsV5Model JinaForRanking JinaVLForRanking Lfm2BidirectionalModel
LlamaBidirectionalForSequenceClassification LlamaBidirectionalModel LlamaNemotronVLForSequenceClassification
LlamaNemotronVLModel NomicBertModel Qwen2ForRewardModel Qwen3VLNemotronEmbedModel SiglipModel Terratorch
VoyageQwen3BidirectionalEmbedModel
""",
    TOKENWISE: """
BertForMaskedLM BertForTokenClassification BertSpladeSparseEmbeddingModel BgeM3EmbeddingModel ClefFlashForJointSchema
ClefOmniForJointSchema ColBERTJinaRobertaModel ColBERTLfm2Model ColBERTModernBertModel ColModernVBertForRetrieval
ColPaliForRetrieval ColQwen3 ColQwen3_5 ColUltraVBertForRetrieval HF_ColBERT ModernBertForTokenClassification
ModernVBertModel OpenAIPrivacyFilterForTokenClassification OpsColQwen3Model Qwen2ForProcessRewardModel
Qwen3ASRForcedAlignerForTokenClassification RobertaForMaskedLM RobertaForTokenClassification
XLMRobertaForTokenClassification
""",
}

TABLE: dict[str, Served] = {
    **dict.fromkeys(
        [*_TEXT_MEASURED.split(), *_STATES_MEASURED.split(), *_LATENT_MEASURED.split()],
        Served(Support.SERVED, measured=True),
    ),
    **dict.fromkeys(_PICTURES_MEASURED.split(), Served(Support.PICTURES, measured=True)),
    **dict.fromkeys(
        [*_PICTURES_TEXT_MEASURED.split(), *_PICTURES_STATES_TEXT_MEASURED.split()],
        Served(Support.PICTURES, text_measured=True),
    ),
    **dict.fromkeys(_PICTURES_DEAF_TEXT_MEASURED.split(), Served(Support.PICTURES, text_measured=True, reason=DEAF)),
    **dict.fromkeys(_DEAF_MEASURED.split(), Served(Support.TEXT, text_measured=True, reason=DEAF)),
    **dict.fromkeys(
        [*_ENCODERS_EMBED_MEASURED.split(), *_DECODERS_EMBED_MEASURED.split()], Served(Support.EMBEDS, measured=True)
    ),
    **dict.fromkeys(_ENCODERS_SCORE_MEASURED.split(), Served(Support.SCORES, measured=True)),
    **{name: Served(Support.NOT_YET, reason=why) for why, names in _REFUSED.items() for name in names.split()},
}
# Names that the registry of one release of vLLM has, and the registry of another supported release lacks.
OF_ONE_RELEASE = {
    "0.32": frozenset({"MedusaModel"}),
    "0.33": frozenset(
        """
AliceAIForCausalLM Alpamayo2Super BeamForCausalLM ClefFlashForJointSchema ColUltraVBertForRetrieval
D3ForSequenceClassification DFlash2BeamDraftModel DFlashQwen3XPressModel DomynEdgeForCausalLM DoryForCausalLM
FlintForCausalLM Kolibri1ForCausalLM Lfm2BidirectionalModel MiniCPMOcrForConditionalGeneration ModernVBertModel
MuseSparkDSparkModel MuseSparkForConditionalGeneration ParseAuxMTPModel Qwen3XPressModel RadioMBartPrefixForCausalLM
Step5ForCausalLM Step5ForConditionalGeneration Step5MTP TransformersForMTP TransformersMoEForMTP
""".split()
    ),
}
# Kinds of layers in config.json, by what they keep for a request.
STATES = {"linear_attention", "mamba", "recurrent", "conv", "hybrid", "hybrid_sliding"}
INDICES = {"indexed_attention", "deepseek_sparse_attention", "qwen_sparse_attention", "minimax_m3_sparse"}
INDICES |= {"compressed_sparse_attention", "heavily_compressed_attention"}


ENCODERS = frozenset([*_ENCODERS_EMBED_MEASURED.split(), *_ENCODERS_SCORE_MEASURED.split()])


def task_of(architecture: str, sentence_transformers: bool) -> Task:
    """Return what a model makes of a prompt.

    Args:
        architecture: the name in the model's config.json.
        sentence_transformers: whether modules.json is among the model's files.
    """
    support = TABLE[architecture].support if architecture in TABLE else Support.SERVED
    if support is Support.SCORES:
        return Task.CLASSIFY
    return Task.EMBED if sentence_transformers or support is Support.EMBEDS else Task.GENERATE


def refusal(architecture: str, form: ModelForm | None, sentence_transformers: bool = False) -> str | None:
    """Return why a model is not served, in words for whoever registers the model; None if the model is served.

    Args:
        architecture: the name in the model's config.json. For a name that the table lacks, only the form is judged.
        form: fields of the language model's config; None if the form was judged before.
        sentence_transformers: whether modules.json is among the model's files.
    """
    known = TABLE.get(architecture)
    states = architecture in [*_STATES_MEASURED.split(), *_PICTURES_STATES_TEXT_MEASURED.split()]
    why = _of_form(form, states) if form else None
    if why is None and sentence_transformers and known is not None and not _embeds(architecture, known):
        why = f"modules.json says that the model makes embeddings, and {POOLED}"
    if why is None and known is not None and known.support is Support.NOT_YET:
        why = known.reason
    return f"{architecture} is not served yet: {why}" if why else None


def _embeds(architecture: str, known: Served) -> bool:
    pools = known.support in (Support.EMBEDS, Support.SCORES)
    return pools or known.support is Support.NOT_YET or architecture in EITHER_MEASURED


def language_model_only(architecture: str, asked: bool) -> bool:
    """Return whether an engine holds the language model alone, without towers: the parts that see or hear.

    Args:
        architecture: the name in the model's config.json.
        asked: whether the deployment leaves pictures out.

    An architecture without towers has nothing to leave out."""
    support = TABLE[architecture].support if architecture in TABLE else Support.SERVED
    return support is Support.TEXT or asked and support is Support.PICTURES


def _of_form(form: ModelForm, states: bool) -> str | None:
    """Return why a form is not served of an architecture that is served in other forms; None if the form is served.

    `states`: whether the architecture is served with layers that keep a state."""
    kinds = (
        {kind for kind in form.layer_types if isinstance(kind, str)} if isinstance(form.layer_types, list) else set()
    )
    if form.is_encoder_decoder is True:
        return ENCODER
    if kinds & STATES and not states:
        return STATE
    if kinds & INDICES:
        return SPARSE
    return None

"""The decoder as a Hugging Face model: `import tra.hub` registers it with the Auto classes of transformers.

The weights of a :class:`~tra.model.Decoder` keep their names behind the prefix ``model.decoder.``, but for the output
head, which is ``lm_head``; a saved folder holds JSON and safetensors, and loading one here runs no code from it. Only
this folder imports transformers.
"""

from tra.errors import not_installed

try:
    import transformers
except ModuleNotFoundError as error:
    raise not_installed(error) from None

from tra.hub.adoption import adopt, unadopt
from tra.hub.cache import TraCache
from tra.hub.config import TraConfig
from tra.hub.llama import from_llama
from tra.hub.modeling import (
    TraForCausalLM,
    TraForQuestionAnswering,
    TraForSequenceClassification,
    TraForTokenClassification,
    TraModel,
    TraPreTrainedModel,
    from_decoder,
    to_decoder,
)

transformers.AutoConfig.register(TraConfig.model_type, TraConfig, exist_ok=True)
transformers.AutoModel.register(TraConfig, TraModel, exist_ok=True)
transformers.AutoModelForCausalLM.register(TraConfig, TraForCausalLM, exist_ok=True)
transformers.AutoModelForQuestionAnswering.register(TraConfig, TraForQuestionAnswering, exist_ok=True)
transformers.AutoModelForSequenceClassification.register(TraConfig, TraForSequenceClassification, exist_ok=True)
transformers.AutoModelForTokenClassification.register(TraConfig, TraForTokenClassification, exist_ok=True)

__all__ = [
    "TraCache",
    "TraConfig",
    "TraForCausalLM",
    "TraForQuestionAnswering",
    "TraForSequenceClassification",
    "TraForTokenClassification",
    "TraModel",
    "TraPreTrainedModel",
    "adopt",
    "from_decoder",
    "from_llama",
    "to_decoder",
    "unadopt",
]

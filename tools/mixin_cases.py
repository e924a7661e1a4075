"""A Llama, and models of this package, for the tests that transformers has for every model.

`tools/mixins.py` copies this file beside those tests and runs it there.
"""

import unittest
from dataclasses import asdict
from typing import Any, ClassVar

import torch
import transformers
from transformers.models.auto import modeling_auto

import tra.hub
from tra.hub import adoption
from tra.hub.adopted_attention import Options

from .generation.test_utils import GenerationTesterMixin
from .test_modeling_common import ModelTesterMixin, ids_tensor
from .test_training_mixin import TrainingTesterMixin


class Tester:
    """What the tests ask for a small config and inputs."""

    batch_size, seq_length, is_training = 5, 7, True
    vocab_size, hidden_size, num_hidden_layers, num_attention_heads, num_key_value_heads = 99, 32, 2, 4, 2
    intermediate_size, num_labels = 64, 3
    shared: ClassVar = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
              "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip

    def __init__(self, parent: Any) -> None:
        self.parent = parent

    @property
    def causal_lm_class(self) -> Any:
        return self.parent.all_model_classes[1]

    def get_config(self) -> Any:
        return self.parent.new_config(**self.shared)

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        tokens = ids_tensor([self.batch_size, self.seq_length], self.vocab_size)
        mask = torch.ones_like(tokens).tril()
        return self.get_config(), {"input_ids": tokens, "attention_mask": mask}


class Cases(ModelTesterMixin, GenerationTesterMixin, TrainingTesterMixin):
    model_tester: Any = None
    pipeline_model_mapping: ClassVar[dict[str, Any]] = {}
    test_torch_exportable = False

    def setUp(self) -> None:
        self.model_tester = Tester(self)


class LlamaTest(Cases, unittest.TestCase):
    all_model_classes = (
        transformers.LlamaModel, transformers.LlamaForCausalLM, transformers.LlamaForSequenceClassification,
        transformers.LlamaForTokenClassification,
    )  # fmt: skip

    @staticmethod
    def new_config(**shared: Any) -> Any:
        return transformers.LlamaConfig(intermediate_size=64, max_position_embeddings=512, **shared)


for mapping, suffix in (
    (modeling_auto.MODEL_MAPPING_NAMES, "Model"),
    (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "ForCausalLM"),
    (modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES, "ForSequenceClassification"),
    (modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES, "ForTokenClassification"),
):  # by which the tests know what labels a model takes
    mapping["tra"], mapping["tra_llama"] = f"Tra{suffix}", f"TraLlama{suffix}"


class AdoptedLlamaTest(Cases, unittest.TestCase):
    all_model_classes = tuple(adoption.adopted_class(model) for model in LlamaTest.all_model_classes)

    @staticmethod
    def new_config(**shared: Any) -> Any:
        config = adoption.adopted_class(transformers.LlamaConfig)(
            intermediate_size=64, max_position_embeddings=512, **shared
        )
        config.tra = asdict(Options())
        return config

    def test_can_set_attention_dynamically(self) -> None:
        self.skipTest("another attention is refused: without its gates it is another model")


class TraTest(Cases, unittest.TestCase):
    all_model_classes = (
        tra.hub.TraModel, tra.hub.TraForCausalLM, tra.hub.TraForSequenceClassification,
        tra.hub.TraForTokenClassification,
    )  # fmt: skip

    @staticmethod
    def new_config(**shared: Any) -> Any:
        return tra.hub.TraConfig(dropout=0.0, **shared)


class RopeTest(Cases, unittest.TestCase):
    all_model_classes = TraTest.all_model_classes

    @staticmethod
    def new_config(**shared: Any) -> Any:
        return tra.hub.TraConfig(attention="rope", dropout=0.0, **shared)

"""Packed layers compute what plain ones do, and only where that is known to hold."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.engine.packed_linear import PackedLinear, pack_linears


def llama(dtype=torch.float32, *, tied=True):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 17, 64])
def test_the_same_numbers_as_a_plain_layer(rows, bias):
    torch.manual_seed(rows)
    plain = torch.nn.Linear(48, 80, bias=bias)
    hidden = torch.randn(1, rows, 48)
    with torch.inference_mode():
        packed = PackedLinear(plain, 8)(hidden)
        assert packed.shape == (1, rows, 80)
        torch.testing.assert_close(packed, plain(hidden), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_a_whole_model(tied):
    ids = torch.tensor([[5, 9, 77, 3]])
    plain, packed = llama(tied=tied), llama(tied=tied)
    assert pack_linears(packed) == 2 * 7 + 1
    assert not any(type(module) is torch.nn.Linear for module in packed.modules())
    with torch.inference_mode():
        torch.testing.assert_close(packed(ids).logits, plain(ids).logits, rtol=1e-4, atol=1e-5)


def test_bfloat16_is_packed_too():
    ids = torch.tensor([[5, 9, 77, 3]])
    plain, packed = llama(torch.bfloat16), llama(torch.bfloat16)
    assert pack_linears(packed) == 2 * 7 + 1
    with torch.inference_mode():
        torch.testing.assert_close(packed(ids).logits, plain(ids).logits, rtol=0.05, atol=0.01)


def test_other_types_stay_as_they_are():
    model = llama(torch.float16)
    assert pack_linears(model) == 0
    assert isinstance(model.lm_head, torch.nn.Linear)

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from paceline.engine.fused_loss import blended_divergence


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_loss_and_gradient_are_those_of_autograd(weight: float) -> None:
    """400 rows: more than are worked on at once."""
    torch.manual_seed(0)
    output = torch.randn(50, 8)
    hidden, guess = torch.randn(400, 8), torch.randn(400, 8, requires_grad=True)
    loss, divergence = blended_divergence(guess, hidden, output, weight)
    (3.0 * loss).backward()
    assert guess.grad is not None
    found, guess.grad = guess.grad, None

    log_target = F.linear(hidden, output).log_softmax(dim=-1)
    log_draft = F.linear(guess, output).log_softmax(dim=-1)
    kl = (log_target.exp() * (log_target - log_draft)).sum(dim=-1).mean()
    overlap = torch.minimum(log_target.exp(), log_draft.exp()).sum(dim=-1)
    expected = (1.0 - weight) * kl - weight * (overlap + 1e-4).log().mean()
    (3.0 * expected).backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    assert divergence == pytest.approx(kl.item(), rel=1e-4)
    torch.testing.assert_close(found, guess.grad, rtol=1e-3, atol=1e-6)

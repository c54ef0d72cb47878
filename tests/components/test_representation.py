import pytest
import torch
import torch.nn.functional as F

from rl_lab.components.representation.heads import ContinueHead, ObservationHead, RewardHead
from rl_lab.components.representation.identity import Identity


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_reward_head_predicts_the_mean():
    head = RewardHead(6, hidden=())
    features, rewards = noise(3, 5, 6), noise(3, 5, seed=1)
    assert head(features).shape == (3, 5)
    torch.testing.assert_close(head.loss(features, rewards), (head(features) - rewards).square().mean())


def test_continue_head_predicts_the_probability_of_going_on():
    head = ContinueHead(6)
    features = noise(8, 6)
    terminated = torch.tensor([True, False] * 4)
    probability = head(features)
    assert ((probability > 0) & (probability < 1)).all()
    expected = -torch.where(terminated, 1.0 - probability, probability).log().mean()
    torch.testing.assert_close(head.loss(features, terminated), expected)


def test_observation_head_reconstructs():
    head = ObservationHead(6, 4)
    features, observations = noise(8, 6), noise(8, 4, seed=1)
    assert head(features).shape == (8, 4)
    torch.testing.assert_close(head.loss(features, observations), F.mse_loss(head(features), observations))


@pytest.mark.parametrize(
    "head", [RewardHead(6), ContinueHead(6), ObservationHead(6, 4)], ids=lambda h: type(h).__name__
)
def test_heads_learn(head):
    features = noise(32, 6)
    target = noise(32, 4, seed=1) if isinstance(head, ObservationHead) else (features[:, 0] > 0).float()
    optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = head.loss(features, target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


def test_identity_is_the_observation():
    identity, observations = Identity(), noise(3, 4)
    for view in (identity, identity.observe, identity.observe_sequence):
        assert view(observations) is observations
    assert list(identity.parameters()) == []

"""What goes between the blocks of a model, and what a workload's loss calls its model with."""

import pytest
import torch
from torch import nn

from podium.engine.blocks import Answer, Between, asked_inputs, look_at_blocks
from podium.engine.precision import PrecisionSection
from podium.errors import UserError
from podium.prepare import prepare
from podium.recipe import load_recipe
from podium.workloads.base import WORKLOADS
from tests.conftest import TINY


def test_images_with_channels_last_travel_without_gaps():
    image = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    between = Between.of(image, 2)
    sent = between.leaving(image)
    assert sent.is_contiguous()
    assert sent.shape == between.empty(2, "cpu").shape == (2, 4, 5, 3)
    back = between.arrived(sent)
    assert torch.equal(back, image)
    assert back.stride() == image.stride()
    plain = Between.of(torch.randn(2, 3, 4, 5), 2)
    assert plain.shape == (3, 4, 5)
    assert plain.leaving(image).is_contiguous()  # laid out otherwise than it was


def test_tensors_without_rows_of_samples_cannot_travel():
    with pytest.raises(UserError, match="a row for each sample"):
        Between.of(torch.zeros(3), 2)


@pytest.mark.parametrize("workload", sorted(WORKLOADS))
def test_the_loss_of_an_answer_is_that_of_the_model(workload):
    """What a pipeline does in two places on two occasions: ask what the model is called with, then give the output."""
    prepared = prepare(load_recipe(TINY[workload][0], TINY[workload][1:]))
    batch, model = prepared.workload.example(4), prepared.model
    for training in (False, True):
        model.train(training)
        torch.manual_seed(1)
        whole = prepared.workload.loss(model, batch)
        torch.manual_seed(1)
        output = model(*asked_inputs(prepared.workload, batch, training=training))
        torch.manual_seed(1)
        found = prepared.workload.loss(Answer(output, training=training), batch)
        assert torch.equal(found.sum, whole.sum)
        assert found.count == whole.count


def test_looking_at_blocks_changes_nothing_and_counts():
    prepared = prepare(load_recipe(TINY["cnn"][0], TINY["cnn"][1:]))
    model = prepared.model
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    blocks = [block for _, block in prepared.workload.stages(model)]
    inputs, facts = look_at_blocks(prepared.workload, blocks, 4, PrecisionSection(), torch.device("cpu"))
    assert all(tensor.is_meta and len(tensor) == 4 for tensor in inputs)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(fact.products > 0 and fact.activation_bytes > 0 for fact in facts)
    (last,) = facts[-1].outputs
    assert last.shape == (10,)
    assert isinstance(blocks[0], nn.Module)

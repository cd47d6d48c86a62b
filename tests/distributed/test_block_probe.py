"""What goes between the blocks of a model, and what a workload's loss calls its model with."""

import pytest
import torch
from torch import nn

from podium.distributed.pipeline.block_probe import FixedOutput, TensorSpec, model_inputs, probe_blocks
from podium.errors import UserError
from podium.recipe.loading import load_recipe
from podium.recipe.sections.precision import PrecisionSection
from podium.training.build import build_training
from podium.workloads.registry import WORKLOADS
from tests.support.recipes import TINY


def test_images_with_channels_last_travel_without_gaps():
    image = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    spec = TensorSpec.of(image, 2)
    sent = spec.to_message(image)
    assert sent.is_contiguous()
    assert sent.shape == spec.empty(2, "cpu").shape == (2, 4, 5, 3)
    back = spec.from_message(sent)
    assert torch.equal(back, image)
    assert back.stride() == image.stride()
    plain = TensorSpec.of(torch.randn(2, 3, 4, 5), 2)
    assert plain.shape == (3, 4, 5)
    assert plain.to_message(image).is_contiguous()  # laid out otherwise than it was


def test_tensors_without_rows_of_samples_cannot_travel():
    with pytest.raises(UserError, match="a row for each sample"):
        TensorSpec.of(torch.zeros(3), 2)


@pytest.mark.parametrize("workload", sorted(WORKLOADS))
def test_the_loss_of_an_answer_is_that_of_the_model(workload):
    """What a pipeline does in two places on two occasions: ask what the model is called with, then give the output."""
    training = build_training(load_recipe(TINY[workload][0], TINY[workload][1:]))
    batch, model = training.task.workload.example(4), training.state.model
    for is_training in (False, True):
        model.train(is_training)
        torch.manual_seed(1)
        whole = training.task.workload.loss(model, batch)
        torch.manual_seed(1)
        output = model(*model_inputs(training.task.workload, batch, training=is_training))
        torch.manual_seed(1)
        found = training.task.workload.loss(FixedOutput(output, training=is_training), batch)
        assert torch.equal(found.sum, whole.sum)
        assert found.count == whole.count


def test_looking_at_blocks_changes_nothing_and_counts():
    training = build_training(load_recipe(TINY["cnn"][0], TINY["cnn"][1:]))
    model = training.state.model
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    blocks = [block for _, block in training.task.workload.stages(model)]
    inputs, facts = probe_blocks(training.task.workload, blocks, 4, PrecisionSection(), torch.device("cpu"))
    assert all(tensor.is_meta and len(tensor) == 4 for tensor in inputs)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(fact.products > 0 and fact.activation_bytes > 0 for fact in facts)
    (last,) = facts[-1].outputs
    assert last.shape == (10,)
    assert isinstance(blocks[0], nn.Module)

"""Which backend carries the tensors of a device, and whose errors are whose."""

import pytest
import torch
import torch.distributed as dist

from podium.distributed import device_messages
from podium.distributed.instances import Instances
from podium.distributed.lost import InstanceLost, naming_lost_instance
from podium.errors import UserError


def test_a_device_has_its_own_backend_beside_that_of_the_cpu(monkeypatch):
    monkeypatch.setattr(dist, "is_backend_available", lambda name: True)
    assert device_messages.backend_for(torch.device("cpu")) == "gloo"
    assert device_messages.backend_for(torch.device("cuda:1")) == "cpu:gloo,cuda:nccl"
    assert device_messages.backend_for(torch.device("xpu:0")) == "cpu:gloo,xpu:xccl"


def test_devices_that_cannot_exchange_tensors_are_refused(monkeypatch):
    with pytest.raises(UserError, match="kind mps cannot exchange tensors, as torch has no backend for that"):
        device_messages.backend_for(torch.device("mps"))
    monkeypatch.setattr(dist, "is_backend_available", lambda name: False)
    with pytest.raises(UserError, match="need torch's backend nccl, which this torch was built without"):
        device_messages.backend_for(torch.device("cuda"))


def test_control_takes_no_tensor_of_a_device():
    instances = Instances(0, 2)
    for method in (instances.gather, instances.broadcast):
        with pytest.raises(AssertionError, match="a tensor of an accelerator among the messages of control"):
            method(torch.empty(2, device="meta"))


OWN = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    torch.AcceleratorError("CUDA error: device-side assert triggered"),
    dist.DistBackendError("NCCL error: unhandled cuda error: out of memory"),
    RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
    RuntimeError("Backend xccl does not support allgather_into_tensor_coalesced"),
]


@pytest.mark.parametrize("error", OWN, ids=lambda error: type(error).__name__)
def test_an_error_of_the_own_device_keeps_its_sentence(error):
    with pytest.raises(type(error)) as told, naming_lost_instance(3):
        raise error
    assert told.value is error


OF_OTHERS = [
    RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:1"),
    dist.DistBackendError("NCCL error: remote process exited or there was a network error"),
]


@pytest.mark.parametrize("error", OF_OTHERS, ids=lambda error: type(error).__name__)
def test_an_error_of_the_connection_names_the_lost_instance(error):
    with pytest.raises(InstanceLost, match="instance 3 is lost"), naming_lost_instance(3):
        raise error

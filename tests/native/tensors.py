"""python tensors.py DIRECTORY: tensors of numpy and torch as destinations and sources. Run by test_client_memory.py."""

import sys

import numpy
import torch

import kvfs
from kvfs.errors import InvalidBufferError


def refused(call, words):
    try:
        call()
    except InvalidBufferError as error:
        assert "key b'key': " in str(error) and words in str(error), error
    else:
        raise AssertionError(f"not refused: {words}")


def main(directory):
    generator = numpy.random.default_rng(7)
    with kvfs.connect(directory, "tensors", gpu=None, timeout_s=20) as client:
        for kind in ("uint8", "float16", "float32", "int64", "complex64", "bool", ">i4"):
            source = (generator.integers(0, 2, (3, 500, 7)) * 100).astype(kind)
            client.put([(kind, source)])
            destination = numpy.zeros_like(source)
            assert client.get_into([(kind, destination)]) == [source.nbytes], kind
            assert numpy.array_equal(source, destination), kind
            part = numpy.zeros((5, 3, 500, 7), kind)
            assert client.get_into([(kind, part[2])]) == [source.nbytes], kind
            assert numpy.array_equal(source, part[2]) and not part[1].any() and not part[3].any(), kind

        for kind in (torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.bool):
            source = torch.arange(3 * 500 * 7).reshape(3, 500, 7).to(torch.float32).remainder(5).to(kind)
            client.put([("torch", source)])
            destination = torch.zeros_like(source)
            assert client.get_into([("torch", destination)]) == [source.nbytes], kind
            assert torch.equal(source.view(torch.uint8), destination.view(torch.uint8)), kind

        client.put([(b"key", numpy.arange(100, dtype="uint8"))])
        parameter = torch.nn.Parameter(torch.zeros(25))
        assert client.get_into([(b"key", parameter)]) == [100]
        assert parameter.detach().numpy().tobytes() == bytes(range(100))

        array = numpy.zeros((10, 20), "uint8")
        refused(lambda: client.get_into([(b"key", array.T)]), "not C-contiguous: shape (20, 10)")
        refused(lambda: client.get_into([(b"key", array[:, ::2])]), "not C-contiguous")
        refused(lambda: client.get_into([(b"key", torch.zeros(20, 10).T)]), "not C-contiguous: shape (10, 20)")
        refused(lambda: client.get_into([(b"key", torch.zeros(200, device="meta"))]), "meta")
        refused(lambda: client.get_into([(b"key", numpy.array([{}, []], object))]), "")
        array.flags.writeable = False
        refused(lambda: client.get_into([(b"key", array)]), "read-only")
        client.put([(b"read-only", array)])
        refused(lambda: client.get_into([(b"key", array[:0].reshape(0, 20)[:, ::2])]), "read-only")
        structure = numpy.zeros(10, [("a", "u1"), ("b", "<f8")])
        client.put([(b"structure", numpy.ones(10, structure.dtype))])
        assert client.get_into([(b"structure", structure)]) == [90]
        assert structure[9]["b"] == 1.0


main(sys.argv[1])

"""silu(gate) * up: the CPU path against transformers' expression, the kernel against the CPU path."""

import pytest
import torch

from quire.kernels.elementwise import activation_cpu

SHAPES = [(1, 1), (1, 3072), (3, 77), (5, 128), (2, 1500)]
TOLERANCE = {torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def gate_up(shape, dtype, device):
    g = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape[0], 2 * shape[1], generator=g) * 4).to(device, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cpu_path_is_silu_times_up(dtype):
    x = gate_up((4, 9), dtype, "cpu")
    want = torch.nn.functional.silu(x[:, :9]) * x[:, 9:]
    assert torch.equal(activation_cpu.silu_mul(x), want)
    out = torch.empty_like(want)
    assert activation_cpu.silu_mul(x, out) is out
    assert torch.equal(out, want)


def compare(shape, dtype, device):
    from quire.kernels.elementwise import activation

    x = gate_up(shape, dtype, device)
    x[0, 0] = -100.0 if device == "cuda" else -80.0  # exp overflows, which numpy would warn of; the result is -0
    tolerance = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(activation.silu_mul(x), activation_cpu.silu_mul(x), **tolerance)


def compare_order(device):
    from quire.kernels.elementwise import activation

    x = gate_up((3, 300), torch.float32, device)
    perm = torch.randperm(300, device=device).to(torch.int32)
    assert torch.equal(activation.silu_mul(x, perm=perm), activation.silu_mul(x)[:, perm.long()])
    assert torch.equal(activation.gather(x[:, :300], perm), x[:, perm.long()])


@pytest.mark.interpret
def test_columns_come_in_an_order_in_the_interpreter():
    compare_order("cpu")


@pytest.mark.gpu
def test_columns_come_in_an_order():
    compare_order("cuda")


@pytest.mark.interpret
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_in_the_interpreter(shape):
    compare(shape, torch.float32, "cpu")


def compare_activation(activation, shape, dtype, device):
    from quire.kernels.elementwise import activation as kernels

    x = gate_up(shape, dtype, device)
    tolerance = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    for function in ("activate", "activate_mul"):
        ours, theirs = (getattr(module, function)(x, activation=activation) for module in (kernels, activation_cpu))
        torch.testing.assert_close(ours, theirs, **tolerance)
    if dtype == torch.float32:
        theirs = {"gelu_tanh": "gelu_pytorch_tanh"}.get(activation, activation)
        torch.testing.assert_close(activation_cpu.activate(x, activation=activation), transformers_activation(theirs)(x))
    out = x.clone()
    assert kernels.activate(out, out, activation=activation) is out
    torch.testing.assert_close(out, activation_cpu.activate(x, activation=activation), **tolerance)


def transformers_activation(name):
    from transformers.activations import ACT2FN

    return ACT2FN[name]


@pytest.mark.interpret
@pytest.mark.parametrize("activation", activation_cpu.ACTIVATIONS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 77)])
def test_activations_in_the_interpreter(activation, shape):
    compare_activation(activation, shape, torch.float32, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("activation", activation_cpu.ACTIVATIONS)
def test_activations(activation, dtype):
    for shape in ((1, 1), (3, 77), (300, 9216)):
        compare_activation(activation, shape, dtype, "cuda")


@pytest.mark.interpret
def test_the_configuration_changes_nothing():
    from quire.kernels.elementwise import activation

    x = gate_up((3, 77), torch.float32, "cpu")
    want = activation.silu_mul(x)
    for config in (activation.Config(32, 1), activation.Config(2048, 4)):
        assert torch.equal(activation.silu_mul(x, config=config), want)


@pytest.mark.interpret
def test_what_does_not_fit_is_refused():
    from quire.kernels.elementwise import activation

    with pytest.raises(ValueError, match="shapes"):
        activation.silu_mul(torch.zeros(2, 7))
    with pytest.raises(ValueError, match="shapes"):
        activation.silu_mul(torch.zeros(2, 8), torch.zeros(2, 8))
    assert activation.silu_mul(torch.zeros(0, 8)).shape == (0, 4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [*SHAPES, (4096, 3072), (257, 14336)])
def test_kernel(shape, dtype):
    compare(shape, dtype, "cuda")


def compare_gate(shape, dtype, device):
    """Gates of each element and of each row, in rows that lie apart; what lies between them stays."""
    from quire.kernels.elementwise import activation

    wide = gate_up(shape, dtype, device)
    x = wide[:, : shape[1]]
    for gate in (wide[:, shape[1] :], wide[:, -1:]):
        want, ours = x * torch.sigmoid(gate), wide.clone()
        got = activation.times_sigmoid(ours[:, : shape[1]], gate)
        torch.testing.assert_close(got, want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        assert torch.equal(ours[:, shape[1] :], wide[:, shape[1] :]) and got.data_ptr() == ours.data_ptr()


@pytest.mark.interpret
def test_gates_in_the_interpreter():
    for shape in SHAPES:
        compare_gate(shape, torch.float32, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_gates(dtype):
    for shape in SHAPES:
        compare_gate(shape, dtype, "cuda")

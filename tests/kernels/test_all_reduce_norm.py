"""Sum over ranks with residual and norm: rank after rank in the interpreter, with others' rows put in place; all on a GPU."""

import pytest
import torch
from exchange_cases import EPS, ends, inputs


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("size", "rows", "width", "parts"), [(2, 1, 64, 1), (2, 3, 67, 1), (2, 2, 128, 3), (4, 2, 70, 1), (8, 1, 64, 2)]
)
def test_a_rank_sends_its_row_takes_the_others_and_empties_the_place_of_the_turn_before(size, rows, width, parts):
    """Ranks one after the other: rows of those behind are put where they will be sent, and what is sent is looked at."""
    from quire.kernels.exchange.all_reduce_norm import EMPTY, all_reduce_norm, reference

    dtype = torch.float32
    made = ends(size, 4, width, dtype, "cpu")
    for turn in range(4):
        xs, before, weight = inputs(size, rows, width, parts, dtype, "cpu")
        xs = [x * (turn + 1) for x in xs]
        want_residual, want = reference(xs, before, weight, EPS)
        sent = [(x.sum(0) if parts > 1 else x) + 0.0 for x in xs]
        found = []
        for rank, ours in enumerate(made):
            for behind in range(rank + 1, size):
                ours.places[turn % 3, behind, :rows] = sent[behind].view(torch.int32)
            residual = before.clone()
            got = all_reduce_norm(xs[rank], residual, weight, EPS, ours)
            torch.testing.assert_close(residual, want_residual)
            torch.testing.assert_close(got, want)
            found.append((residual, got))
            for other in made:
                if other is not ours:
                    arrived = other.places[turn % 3, rank, :rows]
                    torch.testing.assert_close(arrived.view(torch.float32), sent[rank])
                    assert not (arrived == EMPTY[4]).any() and (other.places[:, rank, rows:] == EMPTY[4]).all()
            assert (ours.places[:, rank] == EMPTY[4]).all()
            assert (ours.places[(turn + 2) % 3] == EMPTY[4]).all() and (ours.places[(turn + 1) % 3] == EMPTY[4]).all()
            assert ours.turns.tolist() == [(turn + 1) % 3] * rows + [0] * (4 - rows)  # a count without end would turn negative
        assert all(torch.equal(a, b) for pair in found for a, b in zip(pair, found[0], strict=True))


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("size", "rows", "width", "parts"), [(2, 3, 67, 1), (4, 1, 64, 1), (4, 6, 70, 1), (3, 5, 128, 3), (8, 1, 64, 2)]
)
def test_two_shot_adds_up_its_own_rows_and_takes_the_totals_of_others(size, rows, width, parts):
    """Ranks one after the other: what those behind will send is put where it will arrive, and what is sent is looked at."""
    from quire.kernels.exchange.all_reduce_norm import EMPTY, all_reduce_norm, reference

    most = 3 * size
    made = ends(size, most, width, torch.float32, "cpu", two_shot=True)
    for turn in range(4):
        xs, before, weight = inputs(size, rows, width, parts, torch.float32, "cpu")
        xs = [x * (turn + 1) for x in xs]
        want_residual, want = reference(xs, before, weight, EPS)
        sent = [(x.sum(0) if parts > 1 else x) + 0.0 for x in xs]
        totals = sum(sent[1:], sent[0].clone()) + 0.0
        found = []
        for rank, ours in enumerate(made):
            now = ours.places[turn % 3]
            for row in range(rows):
                first, owner = row // size * size, row % size
                if owner == rank:
                    for behind in range(rank + 1, size):
                        now[0, first + behind] = sent[behind][row].view(torch.int32)
                elif owner > rank:
                    now[1, row] = totals[row].view(torch.int32)
            residual = before.clone()
            got = all_reduce_norm(xs[rank], residual, weight, EPS, ours)
            torch.testing.assert_close(residual, want_residual)
            torch.testing.assert_close(got, want)
            found.append((residual, got))
            for row in range(rows):
                first, owner = row // size * size, row % size
                if owner == rank:
                    arrived = [other.places[turn % 3, 1, row] for other in made if other is not ours]
                    assert all(torch.equal(words.view(torch.float32), totals[row]) for words in arrived)
                else:
                    arrived = [made[owner].places[turn % 3, 0, first + rank]]
                    torch.testing.assert_close(arrived[0].view(torch.float32), sent[rank][row])
                assert not any((words == EMPTY[4]).any() for words in arrived)
            assert (ours.places[(turn + 2) % 3] == EMPTY[4]).all() and (ours.places[(turn + 1) % 3] == EMPTY[4]).all()
            assert ours.turns.tolist() == [(turn + 1) % 3] * rows + [0] * (most - rows)
        assert all(torch.equal(a, b) for pair in found for a, b in zip(pair, found[0], strict=True))


@pytest.mark.interpret
@pytest.mark.parametrize("form", ["x", "parts", "int32"])
def test_more_rows_than_a_launch_takes_are_exchanged_in_slices(form):
    from quire.kernels.exchange.all_reduce_norm import all_reduce_norm, reference

    most, rows, width = 4, 7, 64  # two slices: who is in its third has had ours of the second
    made = ends(2, most, width, torch.float32, "cpu")
    xs, before, weight = inputs(2, rows, width, 3 if form != "x" else 1, torch.float32, "cpu")
    sent = [(x.sum(0) if form != "x" else x) + 0.0 for x in xs]
    if form == "int32":  # the last two hold scales, of columns and of rows
        sums, scales = [(x[:1] * 100).to(torch.int32) for x in xs], [x[1:].abs() for x in xs]
        xs = [torch.cat((a, b.view(torch.int32))) for a, b in zip(sums, scales, strict=True)]
        sent = [a[0] * b[1].view(-1)[:rows, None] * b[0].view(-1)[:width] + 0.0 for a, b in zip(sums, scales, strict=True)]
    want_residual, want = reference(sent, before, weight, EPS)
    for turn, begin in enumerate(range(0, rows, most)):  # what rank 1 will send, each slice in a turn of its own
        end = min(begin + most, rows)
        made[0].places[turn, 1, : end - begin] = sent[1][begin:end].view(torch.int32)
    for rank, buffers in enumerate(made):
        residual = before.clone()
        got = all_reduce_norm(xs[rank], residual, weight, EPS, buffers)
        torch.testing.assert_close(residual, want_residual)
        torch.testing.assert_close(got, want)


@pytest.mark.interpret
def test_what_does_not_fit_is_refused():
    from quire.kernels.exchange.all_reduce_norm import all_reduce_norm, places_shape

    with pytest.raises(ValueError, match="evenly"):
        places_shape(4, 6, 64, two_shot=True)
    ours, _ = ends(2, 4, 64, torch.float32, "cpu")
    for rows, width, dtype in ((2, 32, torch.float32), (2, 64, torch.bfloat16)):
        (x, _), residual, weight = inputs(2, rows, width, 1, dtype, "cpu")
        with pytest.raises(ValueError, match="all_reduce_norm"):
            all_reduce_norm(x, residual, weight, EPS, ours)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("two_shot", [False, True])
@pytest.mark.parametrize(
    ("size", "rows", "width", "parts"),
    [(2, 1, 8192, 1), (2, 3, 4100, 1), (2, 64, 4096, 4), (4, 16, 2048, 2), (2, 40, 8192, 1), (2, 100, 4096, 2)],  # 100: in two
)
def test_ranks_as_streams_of_one_gpu_are_the_reference_in_a_graph_too(size, rows, width, parts, two_shot, dtype):
    from quire.kernels.exchange.all_reduce_norm import all_reduce_norm, empty, reference

    made = ends(size, 64, width, dtype, "cuda", two_shot)
    xs, residual, weight = inputs(size, rows, width, parts, dtype, "cuda")
    for buffers in made:  # to load a kernel waits for those that run, which would wait for it: nothing is waited for yet
        buffers.places.zero_()
    for rank, buffers in enumerate(made):
        all_reduce_norm(xs[rank], residual.clone(), weight, EPS, buffers)
        torch.cuda.synchronize()
    for buffers in made:
        empty(buffers.places)
        buffers.turns.zero_()
    torch.cuda.synchronize()
    residuals, outs = [residual.clone() for _ in range(size)], [None] * size
    streams = [torch.cuda.Stream() for _ in range(size)]

    def launch():
        main = torch.cuda.current_stream()
        for rank, stream in enumerate(streams):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                outs[rank] = all_reduce_norm(xs[rank], residuals[rank], weight, EPS, made[rank])
        for stream in streams:
            main.wait_stream(stream)

    def check(before):
        want_residual, want = reference(xs, before, weight, EPS)
        for rank in range(size):
            assert torch.equal(residuals[rank], residuals[0]) and torch.equal(outs[rank], outs[0])
        tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
        torch.testing.assert_close(residuals[0], want_residual, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(outs[0], want, atol=tolerance, rtol=tolerance)
        return residuals[0].clone()

    before = residual
    for _ in range(4):
        launch()
        torch.cuda.synchronize()
        before = check(before)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for _ in range(5):
        graph.replay()
        torch.cuda.synchronize()
        before = check(before)

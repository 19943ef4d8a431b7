"""Lesson 10's one-row product in Triton, as fast as it can be written there: what the CUDA kernel is measured against.

It does what `10_kernels/01_gemv.cu` does: several rows a program, the first of w asked for before the kernel in front
has ended. Which lanes share a row is the compiler's choice, by the block's shape: `gemv_short` cuts short rows into
pieces, so that fewer lanes share a row, and fewer exchanges join its sum.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from helpers import machine


@triton.jit
def gemv_rows(x_ptr, w_ptr, y_ptr, N, K, ROWS: tl.constexpr, COLS: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        gdc_launch_dependents()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, COLS)
    real = (row < N)[:, None]
    at = w_ptr + row[:, None].to(tl.int64) * K + col[None, :]
    w = tl.load(at, mask=real & (col < K)[None, :], other=0.0, eviction_policy="evict_first")
    if EARLY:
        gdc_wait()  # x may be what the kernel before this one writes
    x = tl.load(x_ptr + col, mask=col < K, other=0.0)
    sums = w.to(tl.float32) * x.to(tl.float32)[None, :]
    for k in range(COLS, K, COLS):
        inside = col + k < K
        w = tl.load(at + k, mask=real & inside[None, :], other=0.0, eviction_policy="evict_first")
        x = tl.load(x_ptr + k + col, mask=inside, other=0.0)
        sums += w.to(tl.float32) * x.to(tl.float32)[None, :]
    tl.store(y_ptr + row, tl.sum(sums, 1), mask=row < N)


@triton.jit
def gemv_short(x_ptr, w_ptr, y_ptr, N, K: tl.constexpr, ROWS: tl.constexpr, PIECE: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        gdc_launch_dependents()
    row, col = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, PIECE)
    w = ()  # a tuple of blocks: all of w is asked for before anything is waited for
    for first in tl.static_range(0, K, PIECE):
        inside = (row < N)[:, None] & (first + col < K)[None, :]
        at = w_ptr + row[:, None].to(tl.int64) * K + (first + col)[None, :]
        w = w + (tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first"),)
    if EARLY:
        gdc_wait()
    sums = tl.zeros((ROWS, PIECE), dtype=tl.float32)
    for i in tl.static_range((K + PIECE - 1) // PIECE):
        x = tl.load(x_ptr + i * PIECE + col, mask=i * PIECE + col < K, other=0.0)
        sums += w[i].to(tl.float32) * x.to(tl.float32)[None, :]
    tl.store(y_ptr + row, tl.sum(sums, 1), mask=row < N)


def gemv(x, w, early=False, cut=(64, 32, 4)):
    """x @ w.T for one row: x (1, K), w (N, K), contiguous, fp16 or fp32 -> (1, N); sums are fp32.

    early: on sm_90 and later it begins while the kernel before it runs, and reads w at once. cut: for rows of up to
    512 elements, rows and warps of a program around the columns of a piece: (rows, columns, warps).
    """
    N, K = w.shape
    if x.shape != (1, K) or not (x.is_contiguous() and w.is_contiguous()):
        raise ValueError(f"gemv takes x (1, K) and w (N, K), contiguous, not {tuple(x.shape)} and {tuple(w.shape)}.")
    y = torch.empty((1, N), dtype=x.dtype, device=x.device)
    if not N:
        return y
    early = early and machine.gpu() and machine.here().capability >= (9, 0)
    more = {"launch_pdl": True} if early else {}
    if K > 512:  # the fastest of those tried on an H200: few warps, each with 16 loads of 16 bytes in flight
        rows, kernel = 4, gemv_rows
        options = {"COLS": 1024, "num_warps": 2}
    else:
        kernel, (rows, piece, warps) = gemv_short, cut
        options = {"PIECE": piece, "num_warps": warps}
    kernel[(triton.cdiv(N, rows),)](x, w, y, N, K, ROWS=rows, EARLY=early, **options, **more)
    return y

"""Steps of small perceptrons, one of each client, compiled by numba as in `kernels`.

A client is one loop: its result does not depend on which others are in the call. Axis letters: C clients, S steps,
n inputs of a step that all clients have, r inputs that count, i inputs and o outputs of a perceptron, L layers,
P numbers of a client.
"""

from __future__ import annotations

from math import exp, sqrt

import numpy as np
from numpy.typing import NDArray

from recleak.kernels import F32, I64, compiled
from recleak.kernels_gcn import _add_bias, _mask

CLASS, NUMBER, VECTOR = 0, 1, 2  # what a perceptron predicts


@compiled
def descend(
    params: F32,  # f32[C, P], changed: weight and bias of each layer in turn
    widths: I64,  # i64[L + 1]: i, the widths of hidden layers, o
    told: F32,  # f32[S, n, i]: inputs that all clients have
    label: F32,  # f32[S, n]: their classes or numbers; NaN: it does not count
    as_mine: NDArray[np.bool_],  # bool[S, n]: the client's own label in the place of it
    target: F32,  # f32[S, n, o]: vectors to predict, or f32[0, 0, o]
    mine: F32,  # f32[C, i]: an input of each client's own
    own: F32,  # f32[C]: its label; NaN: it does not count
    my_target: F32,  # f32[C, o], or f32[0, o]
    kind: int,
    rate: float,
    momentum: float,
) -> None:
    """SGD with momentum, which starts at 0, on the mean over the inputs that count at a step: the surprise at a class,
    half the squared distance to a number, or the distance to a vector.
    """
    steps, n = label.shape
    layers, outputs = widths.shape[0] - 1, widths[-1]
    starts, places = np.zeros(layers + 1, np.int64), np.zeros(layers + 1, np.int64)
    for layer in range(layers):
        starts[layer + 1] = starts[layer] + (widths[layer] + 1) * widths[layer + 1]
        places[layer + 1] = places[layer] + (n + 1) * widths[layer + 1]
    hidden, back = np.empty(places[-1], np.float32), np.empty(places[-1], np.float32)
    x, aim = np.empty((n + 1, widths[0]), np.float32), np.empty((n + 1, outputs), np.float32)
    right = np.empty(n + 1, np.float32)
    speed, slope = np.empty(params.shape[1], np.float32), np.empty(params.shape[1], np.float32)
    fade, step_size = np.float32(momentum), np.float32(rate)
    for c in range(params.shape[0]):
        speed[:] = 0
        for step in range(steps):
            r = 0
            for k in range(n):
                right[r] = own[c] if as_mine[step, k] else label[step, k]
                if right[r] == right[r]:
                    x[r] = told[step, k]
                    if kind == VECTOR:
                        aim[r] = target[step, k]
                    r += 1
            right[r] = own[c]
            if right[r] == right[r]:
                x[r] = mine[c]
                if kind == VECTOR:
                    aim[r] = my_target[c]
                r += 1
            if r == 0:
                slope[:] = 0
            else:
                _forward(params[c], starts, places, widths, x[:r], hidden)
                last = places[layers - 1]
                output = hidden[last : last + r * outputs].reshape(r, outputs)
                _slopes(kind, output, right, aim, back[last : last + r * outputs].reshape(r, outputs))
                _backward(params[c], starts, places, widths, x[:r], hidden, back, slope)
            for p in range(params.shape[1]):
                speed[p] = fade * speed[p] + slope[p]
                params[c, p] -= step_size * speed[p]


@compiled
def _forward(params: F32, starts: I64, places: I64, widths: I64, x: F32, hidden: F32) -> None:
    """The numbers of all layers, after ReLU but for the last; f32[r, i] -> `hidden`."""
    r, layers = x.shape[0], widths.shape[0] - 1
    before = x
    for layer in range(layers):
        i, o, at = widths[layer], widths[layer + 1], starts[layer]
        after = hidden[places[layer] : places[layer] + r * o].reshape(r, o)
        np.dot(before, params[at : at + i * o].reshape(i, o), after)
        _add_bias(after, params[at + i * o : starts[layer + 1]], layer < layers - 1)
        before = after


@compiled
def _slopes(kind: int, output: F32, right: F32, aim: F32, out: F32) -> None:
    """The gradient of the mean loss with respect to the outputs, f32[r, o]."""
    r, o = output.shape
    for k in range(r):
        if kind == CLASS:
            top = output[k, 0]
            for j in range(1, o):
                top = max(top, output[k, j])
            total = 0.0
            for j in range(o):
                out[k, j] = exp(np.float64(output[k, j] - top))
                total += out[k, j]
            for j in range(o):
                out[k, j] = np.float32((out[k, j] / total - (j == np.int64(right[k]))) / r)
        elif kind == NUMBER:
            out[k, 0] = (output[k, 0] - right[k]) / np.float32(r)
        else:
            square = 0.0
            for j in range(o):
                square += np.float64(output[k, j] - aim[k, j]) ** 2
            scale = np.float32(1 / (r * sqrt(square)) if square > 0 else 0.0)
            for j in range(o):
                out[k, j] = (output[k, j] - aim[k, j]) * scale


@compiled
def _backward(params: F32, starts: I64, places: I64, widths: I64, x: F32, hidden: F32, back: F32, slope: F32) -> None:
    """The gradient of all parameters, f32[P], from that of the outputs, which is in `back`."""
    r, layers = x.shape[0], widths.shape[0] - 1
    here = back[places[layers - 1] : places[layers - 1] + r * widths[layers]].reshape(r, widths[layers])
    summed = slope[starts[layers] - widths[layers] : starts[layers]]
    summed[:] = 0
    for k in range(r):
        for j in range(summed.shape[0]):
            summed[j] += here[k, j]
    for layer in range(layers - 1, -1, -1):
        i, o, at = widths[layer], widths[layer + 1], starts[layer]
        if layer == 0:
            np.dot(x.T, here, slope[at : at + i * o].reshape(i, o))
            return
        place = places[layer - 1]
        before = hidden[place : place + r * i].reshape(r, i)
        there = back[place : place + r * i].reshape(r, i)
        np.dot(before.T, here, slope[at : at + i * o].reshape(i, o))
        np.dot(here, params[at : at + i * o].reshape(i, o).T, there)
        _mask(there, before, slope[starts[layer] - i : starts[layer]])
        here = there

# SPDX-License-Identifier: Apache-2.0
"""Execution of layers: the choices around their formula, made when they are built.

execution.py                  reads the settings once, and chooses for every layer of a stage
branch_runner.py              runners of residual branches, nested in one order
activation_policy.py          activations saved for backward, where, and the ones computed again
cuda_graphs.py                parts that are recorded once and launched as graphs
compilation.py                regions that torch.compile makes one kernel of
fp8_layers.py                 linear layers that multiply in FP8 or FP4
transformer_engine.py         layers that compute by NVIDIA's Transformer Engine
transformer_engine_package.py its package and recipes
operations.py                 the implementation that each operation has got, for the log

What lies inside a layer (attention, MLP, experts, norms) imports none of this: it is told.
"""

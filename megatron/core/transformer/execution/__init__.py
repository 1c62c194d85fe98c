# SPDX-License-Identifier: Apache-2.0
"""How layers are executed: what surrounds their formula, chosen when they are built.

execution.py                  reads the settings once, and chooses for every layer of a stage
branch_runner.py              runners of residual branches, nested in one order
activation_policy.py          which activations wait for backward, where, and which are computed again
cuda_graphs.py                parts that are recorded once and launched as graphs
compilation.py                regions that torch.compile makes one kernel of
fp8_layers.py                 linear layers that multiply in FP8 or FP4
transformer_engine.py         layers that compute by NVIDIA's Transformer Engine
transformer_engine_package.py its package and recipes
operations.py                 which implementation each operation has got, for the log

What lies inside a layer (attention, MLP, experts, norms) imports none of this: it is told.
"""

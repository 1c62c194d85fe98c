# SPDX-License-Identifier: Apache-2.0 (written by tools/write_stubs.py)
from megatron.core.upstream.inference import BaseInferenceContext as BaseInferenceContext, DynamicInferenceContext as DynamicInferenceContext, StaticInferenceContext as StaticInferenceContext

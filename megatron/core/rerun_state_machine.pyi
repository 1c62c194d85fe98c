# SPDX-License-Identifier: Apache-2.0 (written by tools/write_stubs.py)
from megatron.core.upstream.watching import RerunDataIterator as RerunDataIterator, RerunMode as RerunMode, RerunStateMachine as RerunStateMachine, destroy_rerun_state_machine as destroy_rerun_state_machine, get_rerun_state_machine as get_rerun_state_machine

# SPDX-License-Identifier: Apache-2.0 (written by tools/write_stubs.py)
from megatron.core.upstream.watching import RerunDataIterator as RerunDataIterator, RerunDiagnostic as RerunDiagnostic, RerunMode as RerunMode, RerunState as RerunState, RerunStateMachine as RerunStateMachine, destroy_rerun_state_machine as destroy_rerun_state_machine, get_rerun_state_machine as get_rerun_state_machine

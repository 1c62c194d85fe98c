"""Operations fused by hand, each beside its plain reference: functions on tensors that know no model and no config."""

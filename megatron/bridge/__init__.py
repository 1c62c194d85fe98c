"""Models from and to Hugging Face directories: weights, settings, tokenizer.

rows             one parameter of ours from theirs, and back, as its Row in the table of families says
tensor_files     their weights on disk: read and written tensor by tensor
settings         their config.json and our settings
checkpoints      our checkpoints as a converter reads and writes them
conversion       whole models in both directions, and the proof that the result is the source
convert          the command line: python -m megatron.bridge.convert
"""

"""The field groups of TransformerConfig, one concern per file."""

"""Parts that models share: embeddings, output layer, loss."""

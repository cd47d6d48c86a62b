"""Text as tokens: documents, tokenizers, folders of tokens, and windows over them."""

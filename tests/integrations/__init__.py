"""Hugging Face's libraries over zerofx."""

"""From any source of prompts to token sequences with a loss mask: rows, chat template, answers, text windows, files."""

"""Checkpoints that other tools read, written from the codes as they were solved. One file a format; nothing is rounded again."""

from bakron.export.card import model_card
from bakron.export.checkpoint import Linear
from bakron.export.files import FORMATS, Content, check_content, differing, form_of, sizes, write
from bakron.export.verify import verify

__all__ = ["FORMATS", "Content", "Linear", "check_content", "differing", "form_of", "model_card", "sizes", "verify", "write"]

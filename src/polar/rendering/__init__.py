"""Messages to token ids and back, for any model: ``load_renderer``."""

from polar.rendering.provider import load_renderer

__all__ = ["load_renderer"]

"""Text in, packed rows of tokens out: `source` reads rows, `chat` renders them, `stream` orders and packs them."""

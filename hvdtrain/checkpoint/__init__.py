"""Checkpoints: what one is (``files``), how it is written (``writer``), which one to resume (``resume``), ``best`` of them."""

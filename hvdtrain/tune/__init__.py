"""The settings under which a recipe's step is fastest on these hosts: searched, stored, and used by ``hvdtrain run``."""

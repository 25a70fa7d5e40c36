"""What a user can get wrong in planning, as a sentence."""


class PlanError(ValueError):
    """Documents, ranks or settings that no layout or plan can serve; the message names the value and the limit."""

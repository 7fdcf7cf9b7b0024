"""How commands draw their answers: tables, bars, explanations, plots."""

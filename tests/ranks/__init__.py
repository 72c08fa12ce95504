"""What tests of ranks share: a toy engine, and a rank on a workbench."""

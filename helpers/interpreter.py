def install():
    """placeholder until the real one lands"""

def blocking():
    return None


def warnings():
    return []

"""stub to be replaced"""


def check_url(url):
    pass

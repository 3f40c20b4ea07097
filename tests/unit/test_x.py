def test_x(load, call, tmp_path):
    m = load("library","sglang_server")
    a = call(m, {"name":"n","slug":"s","root":str(tmp_path/"r"),"port":39999,"profile":"p","argv":["/no/such","-m","x"],"script":"x","script_path":str(tmp_path/"r/s")}, check=True)
    print(a)
    assert 0

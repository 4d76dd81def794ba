#!/bin/sh
# make_api_server.sh FOLDER: builds FOLDER/kube-apiserver from Debian's sources, for test_api_server.py. Needs a source
# entry (deb-src), and Debian's golang-go, etcd-server and dpkg-dev. Takes five minutes of CPU and 2 GB below FOLDER.
set -eu
folder=$(mkdir -p "$1" && cd "$1" && pwd)
project=k8s.io/kubernetes
tree="$folder/gopath/src/$project"
cd "$folder"
apt-get source --download-only kubernetes
mkdir -p "$tree"
tar xzf kubernetes_*.orig.tar.gz --strip-components=1 -C "$tree"
apt-get download golang-github-modern-go-reflect2-dev # the sources' own is older than Debian's compiler allows
dpkg -x golang-github-modern-go-reflect2-dev_*.deb "$folder/newer"
rm -r "$tree/vendor/github.com/modern-go/reflect2"
cp -rL "$folder/newer/usr/share/gocode/src/github.com/modern-go/reflect2" "$tree/vendor/github.com/modern-go/"
cd "$tree"
export GOPATH="$folder/gopath" GOCACHE="$folder/cache" CGO_ENABLED=0 GO111MODULE=off

# The sources come without the description of the built-in kinds.
go build -o "$folder/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
kinds=$(find pkg staging plugin -name '*.go' -exec grep -l '+k8s:openapi-gen=' {} + | xargs -n 1 dirname | sort -u |
    grep -v -e code-generator -e sample-apiserver |
    sed "s#^staging/src/#$project/vendor/#; s#^pkg/#$project/pkg/#; s#^plugin/#$project/plugin/#" | paste -sd,)
"$folder/openapi-gen" --input-dirs "$kinds" --output-base "$folder/gopath/src" \
    --output-package "$project/pkg/generated/openapi" --output-file-base zz_generated.openapi \
    --go-header-file hack/boilerplate/boilerplate.generatego.txt --report-filename "$folder/violations"

of=k8s.io/component-base/version
go build -o "$folder/kube-apiserver" \
    -ldflags "-X $of.gitVersion=v1.20.2 -X $of.gitMajor=1 -X $of.gitMinor=20" ./cmd/kube-apiserver

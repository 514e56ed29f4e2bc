#!/usr/bin/env bash
# Installs a Docker engine from Debian's packages, for machines and CI runners without an engine.
#
#   env/install-docker.sh           installs engine >= 26, Compose >= 2.26 and buildx if they are missing
#   env/install-docker.sh --start   the same, then starts the engine if none answers
#   env/install-docker.sh --stop    stops the engine that --start started, and no other
#
# Debian 12's engine (20.10) is too old, so the packages come from Debian 13. The script uses a private apt state: the machine's
# sources, lists and pins do not change, and all other packages still come from Debian 12.
set -euo pipefail

packages=(docker.io docker-cli docker-compose docker-buildx containerd) # from Debian 13; these five run with the libc of Debian 12
engine_floor=26 compose_floor=2.26
pidfile=/run/docker-started-by-hand.pid
log=/var/log/dockerd.log

say() { echo "install-docker: $*"; }
fail() { say "$*" >&2; exit 1; }
as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi; }
answers() { docker info >/dev/null 2>&1; }
at_least() { [ "$(printf '%s\n%s\n' "$1" "$2" | sort -V | head -n1)" = "$1" ]; } # at_least FLOOR FOUND

# The installed versions. An engine that answers counts, even if it is remote and dockerd is not installed here.
engine_version() {
    docker version --format '{{.Server.Version}}' 2>/dev/null | grep -E '^[0-9]' ||
        dockerd --version 2>/dev/null | sed -nE 's/^Docker version ([0-9.]+).*/\1/p'
}
compose_version() { docker compose version --short 2>/dev/null | sed 's/^v//'; }
ours() { # prints the pid of the engine that --start started, if it is running
    local pid
    pid=$(cat $pidfile 2>/dev/null) && [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = dockerd ] && echo "$pid"
}
complete() {
    local engine compose
    engine=$(engine_version) && compose=$(compose_version) && [ -n "$engine" ] && [ -n "$compose" ] &&
        at_least $engine_floor "$engine" && at_least $compose_floor "$compose" && docker buildx version >/dev/null 2>&1
}

install_packages() {
    # shellcheck disable=SC1091
    . /etc/os-release
    [ "${ID:-}" = debian ] || fail "no engine >= $engine_floor with Compose >= $compose_floor and buildx was found, and this script" \
        "installs on Debian only (found: ${PRETTY_NAME:-unknown}). Install Docker by its documentation for this system."
    local uri state keyring=/usr/share/keyrings/debian-archive-keyring.gpg
    uri=$("$(dirname "$0")/apt-mirror" "$VERSION_CODENAME")

    state=$(mktemp -d)
    # shellcheck disable=SC2064
    trap "rm -rf '$state'" EXIT
    chmod 755 "$state" # apt downloads as its own user
    mkdir -p "$state"/{lists,cache,preferences.d}/partial
    for suite in "$VERSION_CODENAME" trixie; do
        echo "deb [signed-by=$keyring] $uri $suite main"
    done | sort -u >"$state/sources.list"
    printf 'Package: *\nPin: release n=trixie\nPin-Priority: 100\n\nPackage: %s\nPin: release n=trixie\nPin-Priority: 600\n' \
        "${packages[*]}" >"$state/preferences"
    [ "$VERSION_CODENAME" != trixie ] || : >"$state/preferences"
    local apt=(apt-get -qq -o DPkg::Lock::Timeout=600 # another apt may be running, such as unattended-upgrades
        -o Dir::Etc::sourcelist="$state/sources.list" -o Dir::Etc::sourceparts=/dev/null
        -o Dir::Etc::preferences="$state/preferences" -o Dir::Etc::preferencesparts=/dev/null
        -o Dir::State::lists="$state/lists" -o Dir::Cache="$state/cache" -o APT::Install-Recommends=false)
    say "installing ${packages[*]} and what they need"
    as_root "${apt[@]}" update
    as_root env DEBIAN_FRONTEND=noninteractive "${apt[@]}" install -y "${packages[@]}" iptables ca-certificates >"$state/log" 2>&1 ||
        { tail -n 20 "$state/log" >&2; fail "apt could not install the packages; its last lines are above"; }
    hash -r
    complete || fail "installed, but engine '$(engine_version || true)', Compose '$(compose_version || true)' or buildx does not answer" \
        "through $(command -v docker); remove older clients or plugins that come first (PATH, ~/.docker/cli-plugins)"
}

start() {
    answers && { say "an engine answers already"; return; }
    if [ -d /run/systemd/system ]; then
        as_root systemctl start docker
    else
        [ -n "$(ours)" ] || as_root rm -f $pidfile # from an engine that was killed; its pid may belong to another process now
        # In a new session, so that the engine keeps running after this shell; --stop finds it by the pid file.
        # shellcheck disable=SC2016
        as_root setsid sh -c 'dockerd --pidfile "$1" >"$2" 2>&1 </dev/null &' sh $pidfile $log
    fi
    for _ in $(seq 60); do
        answers && { say "engine $(engine_version) started; its log: $log"; return; }
        sleep 1
    done
    tail -n 20 $log >&2 || true
    fail "dockerd did not answer within 60 s; the end of $log is above"
}

stop() {
    local pid
    pid=$(ours) || { say "no engine that this script started is running"; return; }
    as_root kill "$pid"
    for _ in $(seq 60); do
        [ -n "$(ours)" ] || { say "engine stopped"; return; }
        sleep 1
    done
    fail "dockerd (process $pid) is still running 60 s after SIGTERM"
}

case "${1:-}" in
    --stop) stop ;;
    "" | --start)
        if complete; then
            say "engine $(engine_version), Compose $(compose_version) and buildx are installed"
        else
            install_packages
            say "installed engine $(engine_version), Compose $(compose_version), buildx"
        fi
        [ "${1:-}" != --start ] || start
        ;;
    *) fail "unknown option '$1'; use --start, --stop or nothing" ;;
esac
